"""Rollouts, routers, the index, and what a service needs beside its workers."""

import subprocess

import httpx
from tests.servers.redis_server import RedisServer, free_port

from fairlead_operator.children.prefetch import RETRIES
from fairlead_router.config import RouterConfig
from fairlead_router.server import RouterServer

from .case import Case, ended, now, running, waiting
from .row import DEGRADED, INDEX, NOT_READY, Row

KEYS = "FairleadKeyFileBroken"
DEADLINE = {"progressDeadlineSeconds": 30, "surgeTimeoutSeconds": 5}  # environment.py shortens it
HUB_GATED = "fairlead-worker: cannot load model hf://gated/model: the repository is gated (403): accept its terms on the hub"


def _roll_out_forever(case: Case) -> None:
    """Edit a service that serves. The new worker loads without an end, until the real Deployment controller reports its deadline."""
    case.serve()
    before = case.placed_pod()["metadata"]["name"]
    case.edit(engine={"maxNumSeqs": 7})
    case.until(lambda: case.placed_pod()["metadata"]["name"] != before)
    case.report(running())


def _fail_canary(case: Case) -> None:
    case.serve()
    before = case.placed_pod()["metadata"]["name"]
    case.edit(model={"uri": "hf://gated/model"})
    case.until(lambda: case.placed_pod()["metadata"]["name"] != before)
    case.report(ended(HUB_GATED))


def _lose_worker(case: Case) -> None:
    """Restart one of two workers, which then loads without an end."""
    case.serve(workers=2)
    case.report(
        {**running(), "conditions": [{"type": "Ready", "status": "False", "reason": "ContainersNotReady", "lastTransitionTime": now()}]}
    )


ROLLOUTS = (
    Row(
        "A rollout makes no progress",
        "ProgressDeadlineExceeded",
        "Undo the edit, or name a kept revision in spec.rollout.revision",
        _roll_out_forever,
        spec={"rollout": DEADLINE},
        condition="Progressing",
        alerts=(DEGRADED,),
    ),
    Row(
        "A canary does not become ready",
        "CanaryFailed",
        "Edit the spec, or try it again: give spec.rollout.canary.retryToken another value",
        _fail_canary,
        spec={"rollout": {**DEADLINE, "canary": {}}},
        condition="Progressing",
        alerts=(DEGRADED,),
    ),
    Row(
        "A worker is missing for ten minutes, and no pod names a fault",
        "CapacityReduced",
        "See the logs of the pods that are not ready",
        _lose_worker,
        spec={"replicas": 2},
        condition="Degraded",
        status="True",
        alerts=(DEGRADED,),
    ),
)


def _route_nowhere(case: Case) -> None:
    """Lead requests to a real router whose only worker refuses connections."""
    pod_ip = case.network.start_router(case.namespace, worker=False, served_model_name="qwen", hold_timeout=0)
    case.run("worker")
    case.run("router", podIP=pod_ip, podIPs=[{"ip": pod_ip}])


def _serve_with_redis(case: Case, url: str, **settings: str) -> None:
    pod_ip = case.network.start_router(case.namespace, redis_url=url, served_model_name="qwen", **settings)
    case.run("worker")
    case.run("router", podIP=pod_ip, podIPs=[{"ip": pod_ip}])


def _stop_redis(case: Case) -> None:
    _serve_with_redis(case, f"redis://127.0.0.1:{free_port()}")


def _change_password(case: Case) -> None:
    """Give the router a password that the real Redis refuses."""
    redis = RedisServer().start()
    redis.command("CONFIG", "SET", "requirepass", "right")
    (case.folder / "password").write_text("wrong")
    case.network.on_exit(redis.stop)
    _serve_with_redis(case, f"redis://127.0.0.1:{redis.port}", redis_credentials=str(case.folder))


def _break_certificate(case: Case) -> None:
    """Report the error of a real router that starts with a certificate and the key of another."""
    for name in ("a", "b"):
        request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}"]
        files = ["-keyout", str(case.folder / f"{name}.key"), "-out", str(case.folder / f"{name}.crt")]
        subprocess.run([*request, *files], check=True, capture_output=True)
    case.run("worker")
    files = {"ssl_certfile": str(case.folder / "a.crt"), "ssl_keyfile": str(case.folder / "b.key")}
    try:
        RouterServer(RouterConfig(workers="static://127.0.0.1:9", **files))
    except ValueError as error:
        case.report(ended(f"fairlead-router: {error}", 2, restarts=3), "router")


def _break_keys(case: Case) -> None:
    """Report what the readiness probe of a real router sees whose key file is no YAML."""
    (case.folder / "keys.yaml").write_text("tenants: [")
    pod_ip = case.network.start_router(case.namespace, served_model_name="qwen", api_keys_file=str(case.folder / "keys.yaml"))
    status = httpx.get(f"{case.network.urls[case.namespace]}/ready").status_code
    case.run("worker")
    pod = case.report({**running(), "podIP": pod_ip, "podIPs": [{"ip": pod_ip}]}, "router")
    case.event("Unhealthy", f"Readiness probe failed: HTTP probe failed with statuscode: {status}", pod)


ROUTERS = (
    Row("Routers do not reach a worker", "RequestFailed", "kubectl logs deployment/qwen-router", _route_nowhere),
    Row(
        "The key and the certificate of `router.tls` do not belong together",
        "CrashLoopBackOff",
        "Put a certificate and its own key into the Secret of spec.router.tls",
        _break_certificate,
        spec={"router": {"tls": {"secretName": "web-tls"}}},
        prepare=lambda case: case.make_secret("web-tls"),
    ),
    Row(
        "The key file of `access` is invalid",
        "RouterNotReady",
        "Read the routers' log",
        _break_keys,
        spec={"access": {"keysSecretRef": {"name": "keys"}}},
        prepare=lambda case: case.make_secret("keys"),
        event="Normal",
        alerts=(NOT_READY, KEYS),
    ),
    Row(
        "Redis does not answer",
        "IndexUnavailable",
        "Check that Redis runs, and its Secret",
        _stop_redis,
        condition="Degraded",
        status="True",
        alerts=(DEGRADED, INDEX),
    ),
    Row(
        "Redis refuses the password",
        "IndexUnavailable",
        "Check that Redis runs, and its Secret",
        _change_password,
        condition="Degraded",
        status="True",
        alerts=(DEGRADED, INDEX),
    ),
)


def _wait_for_certificate(case: Case) -> None:
    case.run("worker")
    pod = case.placed_pod("router")
    case.event("FailedMount", 'MountVolume.SetUp failed for volume "tls" : secret "qwen-router-tls" not found', pod)
    case.report(waiting("ContainerCreating", ""), "router")


def _fail_download(case: Case) -> None:
    """Restart the Job's container as often as the Job allows. The real Job controller then gives it up."""
    pod = case.report(ended(HUB_GATED, restarts=RETRIES + 1), "prefetch")
    case.serve()
    case.end(pod)


def _serve(case: Case) -> None:
    case.serve()


OPTIONAL = (
    Row(
        "The Gateway API is not installed",
        "GatewayApiMissing",
        "install its CRDs, or remove the field",
        _serve,
        spec={"exposure": {"gateway": {"parentRef": {"name": "web"}}}},
        condition="GatewayReady",
        alerts=(DEGRADED,),
    ),
    Row(
        "cert-manager is not installed",
        "CertManagerMissing",
        "Install cert-manager, or name a Secret in spec.router.tls.secretName",
        _wait_for_certificate,
        spec={"router": {"tls": {"issuerRef": {"name": "ca"}}}},
    ),
    Row(
        "A service of `otherServices` does not exist",
        "OtherServiceUnusable",
        "Create it, or remove the name",
        _serve,
        spec={"exposure": {"otherServices": ["llama"]}},
        condition="Degraded",
        status="True",
        alerts=(DEGRADED,),
    ),
    Row(
        "The Job that fills the cache gives up",
        "PrefetchFailed",
        "Correct spec.model, or repeat it with kubectl delete job",
        _fail_download,
        prepare=lambda case: case.claim("models", node="cpu"),
        spec={"model": {"cache": {"persistentVolumeClaim": {"claimName": "models"}, "prefetch": "Enabled"}}},
        condition="ModelCached",
        alerts=(DEGRADED,),
    ),
    Row(
        "The claim of the batch server does not exist",
        "FailedScheduling",
        "PersistentVolumeClaim batches, which spec.batch.storageURI refers to, does not exist. Create it in this namespace",
        _serve,
        spec={"batch": {"storageURI": "pvc://batches/qwen"}},
        condition="BatchReady",
        alerts=(DEGRADED,),
    ),
)

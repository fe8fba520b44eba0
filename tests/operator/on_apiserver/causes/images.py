"""Images, containers and volumes: pod states and Events as a kubelet writes them, with the words of kubelet, containerd and registries."""

from collections.abc import Callable

from .case import Case, ended, running, waiting
from .row import DEGRADED, Row

Producer = Callable[[Case], None]

PULL = 'failed to pull and unpack image "docker.io/acme/worker:1": failed to resolve reference "docker.io/acme/worker:1": '
CREATING = waiting("ContainerCreating", "")


def report(status: dict[str, object]) -> Producer:
    """Report the status of the worker's pod."""

    def produce(case: Case) -> None:
        case.report(status)

    return produce


def with_event(status: dict[str, object], reason: str, message: str, component: str = "worker") -> Producer:
    """Report the status of a pod, and an Event of it."""

    def produce(case: Case) -> None:
        if component != "worker":
            case.run("worker")
        case.event(reason, message, case.placed_pod(component))
        case.report(status, component)

    return produce


IMAGES = (
    Row(
        "The image does not exist",
        "ImagePullBackOff",
        "Correct the image",
        report(waiting("ErrImagePull", PULL + "docker.io/acme/worker:1: not found")),
    ),
    Row(
        "The registry asks for credentials",
        "ImagePullBackOff",
        "Give the pods a pull secret that may read it (imagePullSecrets)",
        report(waiting("ImagePullBackOff", f'Back-off pulling image "worker:1": ErrImagePull: {PULL}unexpected status: 401 Unauthorized')),
    ),
    Row(
        "The registry limits pulls",
        "ImagePullBackOff",
        "The registry limits pulls: wait, log in with a pull secret, or mirror the image",
        report(
            waiting("ErrImagePull", PULL + "429 Too Many Requests - toomanyrequests: You have reached your unauthenticated pull rate limit")
        ),
    ),
    Row(
        "The node does not reach the registry",
        "ImagePullBackOff",
        "The node cannot reach the registry: check its network, proxy and certificates",
        report(waiting("ErrImagePull", PULL + "dial tcp: lookup docker.io on 10.96.0.10:53: no such host")),
    ),
    Row(
        "The image is for another processor",
        "ImagePullBackOff",
        "The image is not built for this node's processor",
        report(waiting("ErrImagePull", PULL + "no match for platform in manifest: not found")),
    ),
    Row(
        "The image is not on the node, and `imagePullPolicy` is Never",
        "ErrImageNeverPull",
        "Load the image onto the node, or set imagePullPolicy to IfNotPresent",
        report(waiting("ErrImageNeverPull", 'Container image "worker:1" is not present with pull policy of Never')),
    ),
)

VOLUMES = (
    Row(
        "The Secret of `secretRef` does not exist",
        "CreateContainerConfigError",
        "Secret hub, which spec.model.secretRef refers to, does not exist. Create it in this namespace",
        report(waiting("CreateContainerConfigError", 'secret "hub" not found')),
        spec={"model": {"secretRef": {"name": "hub"}}},
    ),
    Row(
        "The image runs as root",
        "CreateContainerConfigError",
        "The image runs as root, which is forbidden here: use one with a numeric USER",
        report(waiting("CreateContainerConfigError", "container has runAsNonRoot and image will run as root")),
    ),
    Row(
        "The NVIDIA driver or toolkit fails",
        "RunContainerError",
        "The node's NVIDIA driver or container toolkit fails",
        report(
            waiting(
                "RunContainerError",
                "failed to create containerd task: OCI runtime create failed: nvidia-container-cli: initialization error: driver error",
            )
        ),
    ),
    Row(
        "The Secret of a volume does not exist",
        "FailedMount",
        "Create the Secret keys in this namespace: the kubelet then mounts it",
        with_event(CREATING, "FailedMount", 'MountVolume.SetUp failed for volume "keys" : secret "keys" not found'),
    ),
    Row(
        "The volume is attached to another node",
        "FailedMount",
        "use a ReadWriteMany claim, or wait until the old pod has gone",
        with_event(CREATING, "FailedAttachVolume", 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) qwen-worker-0'),
    ),
    Row(
        "The network plugin fails",
        "FailedCreatePodSandBox",
        "The node's container runtime or network plugin fails",
        with_event(
            CREATING, "FailedCreatePodSandBox", 'Failed to create pod sandbox: plugin type="calico" failed (add): connection refused'
        ),
    ),
    Row(
        "The Secret of `router.tls` does not exist",
        "FailedMount",
        "Secret web-tls, which spec.router.tls refers to, does not exist. Create it in this namespace",
        with_event(CREATING, "FailedMount", 'MountVolume.SetUp failed for volume "tls" : secret "web-tls" not found', "router"),
        spec={"router": {"tls": {"secretName": "web-tls"}}},
    ),
)


def _stay_not_ready(case: Case) -> None:
    case.serve(workers=2)
    pod = case.report(running(served=True))
    case.event("Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 503", pod)


CONTAINERS = (
    Row(
        "A worker needs more memory than its limit",
        "OOMKilled",
        "Raise spec.resources.memory",
        report(ended("", 137, "OOMKilled")),
        spec={"resources": {"memory": "1Gi"}},
    ),
    Row(
        "A worker ends again and again",
        "CrashLoopBackOff",
        "exited with code 1: ValueError: unknown plug-in. See kubectl logs",
        report(ended("Traceback (most recent call last):\nValueError: unknown plug-in", restarts=3)),
    ),
    Row(
        "A liveness probe fails",
        "ProbeFailed",
        "The kubelet restarted it: see kubectl logs",
        with_event(ended("", 137, restarts=1), "Unhealthy", "Liveness probe failed: context deadline exceeded"),
    ),
    Row(
        "One of two workers stays not ready",
        "NotReady",
        "If it does not recover, delete the pod: another replaces it",
        _stay_not_ready,
        spec={"replicas": 2},
        condition="Degraded",
        status="True",
        alerts=(DEGRADED,),
    ),
)

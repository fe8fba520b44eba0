"""Names and labels of everything that belongs to a service (docs/reference/objects.md)."""

import hashlib
import json
from typing import Any

from fairlead_operator.api import API_VERSION, KIND, InferenceService

MANAGED_BY = "app.kubernetes.io/managed-by"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
REVISION = "fairlead.dev/revision"
FIELD_MANAGER = "fairlead-operator"

WORKER, ROUTER, BATCH, PREFETCH = "worker", "router", "batch", "prefetch"
ENGINE, AGENT = "engine", "agent"  # containers of a worker pod with runtime VLLM or SGLang; others have one container "worker"
SERVING = (WORKER, AGENT)  # containers that serve a worker's paths
FOLLOWER = "follower"  # a pod of a worker over several nodes that does not serve HTTP
CANARY = "worker-canary"  # the canary's Deployment; its pods are workers, distinguished by TRACK
TRACK, CANARY_TRACK = "fairlead.dev/track", "canary"  # label of pods
CANARY_FAILED = "fairlead.dev/canary-failed"  # annotation of a ControllerRevision: why it was rolled back
CANARY_RETRY = "fairlead.dev/canary-retry"  # beside it: spec.rollout.canary.retryToken of that trial
WORKER_PORT, ROUTER_PORT, SERVICE_PORT, PICKER_PORT = 8000, 8080, 80, 9002
ROUTER_TLS_PORT, SERVICE_TLS_PORT = 8443, 443  # with spec.router.tls, instead of ROUTER_PORT and SERVICE_PORT
BATCH_PORT = 8090  # serves metrics too, and asks for the shared secret for the rest
WORKER_ADMIN_PORT, ROUTER_ADMIN_PORT = 8002, 8082  # for metrics, polls, probes and adapters, not for clients
OPERATOR_PODS = {"app.kubernetes.io/name": "fairlead", COMPONENT: "operator"}  # as the chart labels them


def host_port(ip: str, port: int) -> str:
    """Return host:port of a pod's address, IPv4 or IPv6."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def pod_components(component: str) -> tuple[str, ...]:
    """Return the component labels of the pods of a component."""
    return (WORKER, FOLLOWER) if component == WORKER else (component,)


def workers_service(service: InferenceService) -> str:
    return f"{service.name}-workers"


def workers_url(service: InferenceService, cluster_domain: str) -> str:
    """Return the URL at which routers and new workers discover the workers."""
    return f"dns://{workers_service(service)}.{service.namespace}.svc.{cluster_domain}:{WORKER_PORT}"


def deployment(service: InferenceService, component: str) -> str:
    return f"{service.name}-{component}"


def split(service: InferenceService) -> str:
    """Return the name of the ConfigMap that gives routers the canary split."""
    return f"{service.name}-split"


def model_routes(service: InferenceService) -> str:
    """Return the name of the ConfigMap that gives routers the models of other services."""
    return f"{service.name}-models"


def random_secret(service: InferenceService, purpose: str) -> str:
    """Return the name of a Secret with a random value. The uid distinguishes successive services of one name.

    `purpose`: `nodes` (the pods of one model authenticate each other), `batch` (routers and batch server do), or `responses` (from which
    routers derive the keys of stored responses).
    """
    return f"{service.name}-{purpose}-{digest(service.uid)}"


def redis_secret(service: InferenceService, role: str) -> str:
    """Return the name of the Secret with the Redis credentials of one role (worker or router)."""
    return f"{service.name}-redis-{role}"


def index_namespace(service: InferenceService) -> str:
    return f"{service.namespace}/{service.name}"


def router_tls_secret(service: InferenceService) -> str:
    """Return the name of the Secret with the routers' certificate: the given one, or that which cert-manager writes."""
    tls = service.spec.router.tls
    return tls.secret_name if tls is not None and tls.secret_name is not None else f"{service.name}-router-tls"


def scheme(service: InferenceService) -> str:
    """Return the scheme of the routers' port for clients."""
    return "http" if service.spec.router.tls is None else "https"


def url(service: InferenceService) -> str:
    """Return the base URL for clients."""
    return f"{scheme(service)}://{service.name}.{service.namespace}.svc/v1"


def selector(service: InferenceService, component: str) -> dict[str, str]:
    return {MANAGED_BY: "fairlead", INSTANCE: service.name, COMPONENT: component}


def selector_text(service: InferenceService) -> str:
    """Return the label selector of the workers for `/scale`.

    It excludes canary pods: they are not part of `replicas`, and would count in an autoscaler's mean.
    """
    labels = [f"{key}={value}" for key, value in sorted(selector(service, WORKER).items())]
    return ",".join([*labels, f"{TRACK} notin ({CANARY_TRACK})"])  # equivalent to `!=`, with which /scale cannot be read


def metadata(service: InferenceService, name: str, component: str) -> dict[str, Any]:
    """Return name, labels and the owner reference by which the garbage collector removes the child after its service."""
    made: dict[str, Any] = {"name": name, "namespace": service.namespace, "labels": selector(service, component)}
    if service.uid:
        made["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": service.name,
                "uid": service.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return made


def digest(value: Any) -> str:
    """Return ten hexadecimal digits. Equal values have equal digests on every machine and Python version."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]

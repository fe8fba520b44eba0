"""The part of the operator's configuration that desired state depends on. Pure data; `fairlead up` builds one too."""

from dataclasses import dataclass, field
from typing import Literal

Mesh = Literal["", "istio-ambient", "linkerd"]
"""A service mesh that sends its traffic to a port of its own."""


@dataclass(frozen=True)
class WaveLimits:
    """Limits of the rollout of new images over all services with `engineVersion: Auto`."""

    paused: bool = False  # begin no further service
    max_services: int = 3  # that are updated or observed at the same time
    max_surge_gpus: int | None = None  # of surge workers and canaries of all updates together; None: no limit
    observation_seconds: float = 120.0  # after a service is complete, until its update counts as successful
    max_error_rate_increase: float = 0.01  # share of failed requests beyond that before the update


@dataclass(frozen=True)
class Settings:
    """Images, the index's address and defaults; the same for every service."""

    worker_image: str
    router_image: str
    worker_gpu_image: str = ""  # of workers with GPUs; empty: worker_image
    vllm_image: str = ""  # of engines of runtime VLLM; empty: services name their own
    sglang_image: str = ""  # of engines of runtime SGLang; empty: services name their own
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()  # of services without their own, in the service's namespace
    redis_url: str = ""  # empty: no index, routers route by load
    redis_credentials: bool = False  # workers and routers get Secrets with which they reach Redis
    default_gpus: int = 1  # of a worker whose manifest has no value, times engine.tensorParallel
    cluster_domain: str = "cluster.local"
    assigned_user_ids: bool = False  # pods name no user and group: the cluster assigns them, as OpenShift does
    operator_namespace: str = ""  # from which the operator polls workers and routers; empty: any
    monitoring_namespaces: tuple[str, ...] = ()  # that may read /metrics of all pods
    waves: WaveLimits = field(default_factory=WaveLimits)
    mesh: Mesh = ""  # whose tunnel NetworkPolicies let in; empty: none, or one that keeps the ports, as Istio's sidecars do
    otlp_endpoint: str = ""  # of the collector of traces; empty: workers and routers send none

"""What the operator's own configuration contributes to desired state. Pure data: `fairlead up` makes one too."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Images, the index's address and defaults; the same for every service."""

    worker_image: str
    router_image: str
    image_pull_policy: str = "IfNotPresent"
    redis_url: str = ""  # empty: no index, the routers go by load
    redis_files: tuple[str, ...] = ()  # keys of the Secrets with which workers and routers reach Redis; empty: they need none
    default_gpus: int = 1  # of a worker whose manifest says nothing, times engine.tensorParallel
    cluster_domain: str = "cluster.local"
    operator_namespace: str = ""  # from which the operator asks workers and routers; empty: any
    monitoring_namespaces: tuple[str, ...] = ()  # which may read /metrics of all pods

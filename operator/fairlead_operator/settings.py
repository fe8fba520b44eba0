"""What the operator's own configuration contributes to desired state. Pure data: `fairlead up` makes one too."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Images, the index's address and defaults; the same for every service."""

    worker_image: str
    router_image: str
    image_pull_policy: str = "IfNotPresent"
    redis_url: str = ""  # empty: no index, the routers go by load
    default_gpus: int = 1  # of a worker whose manifest says nothing, times engine.tensorParallel
    cluster_domain: str = "cluster.local"

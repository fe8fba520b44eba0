"""The operator's configuration: flags and, for each, an environment variable FAIRLEAD_<FLAG>; flags win."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from fairlead_operator.settings import Settings


class OperatorConfig(BaseSettings):
    """Reconciles InferenceServices into workers and routers."""

    model_config = SettingsConfigDict(
        env_prefix="FAIRLEAD_",
        cli_prog_name="fairlead-operator",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        frozen=True,
        extra="ignore",
    )

    worker_image: str = Field(min_length=1, description="Image of the workers.")
    router_image: str = Field(min_length=1, description="Image of the routers.")
    image_pull_policy: str = Field("IfNotPresent", pattern="^(Always|IfNotPresent|Never)$", description="Of workers and routers.")
    redis_url: str = Field("", description="The prefix index; empty: none, routers go by load.")
    default_gpus: int = Field(1, ge=0, le=64, description="GPUs of a worker whose manifest says nothing, times engine.tensorParallel.")
    namespace: str = Field("", description="Watch this namespace only; empty: all.")
    lease_namespace: str = Field("", description="Where the Lease is by which one operator leads; empty: the pod's own namespace.")
    lease_name: str = Field("fairlead-operator", min_length=1, description="Operators that share a Lease act one at a time.")
    cluster_domain: str = Field("cluster.local", min_length=1, description="DNS domain of the cluster.")
    health_port: int = Field(8081, ge=0, le=65535, description="Port of /healthz and /readyz; 0: a free one.")
    kubeconfig: str = Field("", description="Where the API server is; empty: the pod's service account, or $KUBECONFIG.")
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="What is logged.")

    @property
    def settings(self) -> Settings:
        return Settings(
            worker_image=self.worker_image,
            router_image=self.router_image,
            image_pull_policy=self.image_pull_policy,
            redis_url=self.redis_url,
            default_gpus=self.default_gpus,
            cluster_domain=self.cluster_domain,
        )

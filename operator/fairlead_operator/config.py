"""The operator's configuration: flags, and an environment variable FAIRLEAD_<FLAG> for each. Flags take precedence."""

from typing import Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from fairlead_common.flags import FlagSettings
from fairlead_common.telemetry.logs import LogFormat, LogLevel
from fairlead_index.redis.access import has_password, parse_url
from fairlead_operator.api.fields import PERCENTAGE, percentage
from fairlead_operator.settings import Mesh, Settings, WaveLimits


class OperatorConfig(FlagSettings):
    """Reconciles InferenceServices into workers and routers."""

    model_config = SettingsConfigDict(cli_prog_name="fairlead-operator")

    worker_image: str = Field(min_length=1, description="Image of the workers.")
    worker_gpu_image: str = Field("", description="Image of workers with GPUs; empty: that of the other workers.")
    vllm_image: str = Field("", description="Image of engines with spec.engine.runtime VLLM; empty: each service names its own.")
    sglang_image: str = Field("", description="Image of engines with spec.engine.runtime SGLang; empty: each service names its own.")
    router_image: str = Field(min_length=1, description="Image of the routers.")
    image_pull_policy: str = Field("IfNotPresent", pattern="^(Always|IfNotPresent|Never)$", description="Of workers and routers.")
    image_pull_secrets: str = Field(
        "", description="Comma-separated pull secrets of services without spec.imagePullSecrets, in their own namespaces."
    )
    redis_url: str = Field("", description="Redis of the prefix index; empty: no index, routers choose workers by load.")
    redis_credentials: str = Field(
        "",
        description="Folder with the files username, password, ca.crt, tls.crt, tls.key, sentinel-username and sentinel-password, each "
        "optional, read at each connection. Certificates and sentinels' logins are also given to workers and routers.",
    )
    redis_bundled: bool = Field(False, description="Redis is the chart's: the operator manages its password and certificate.")
    credentials_secret: str = Field(
        "", description="The operator's own Secret, which it creates; empty: services get no Redis credentials."
    )
    deployment: str = Field("", description="The operator's own Deployment, which owns the Secret; empty: the Secret has no owner.")
    rotation_grace: float = Field(300, ge=0, description="Seconds that previous credentials are accepted after Redis accepts new ones.")
    default_gpus: int = Field(1, ge=0, le=64, description="GPUs of a worker without spec.resources.gpus, times engine.tensorParallel.")
    namespaces: str = Field("", description="Comma-separated namespaces to watch; empty: all.")
    lease_namespace: str = Field("", description="Namespace of the leader election's Lease; empty: the pod's own namespace.")
    lease_name: str = Field("fairlead-operator", min_length=1, description="Lease name; of the operators that share a Lease, one leads.")
    cluster_domain: str = Field("cluster.local", min_length=1, description="DNS domain of the cluster.")
    assigned_user_ids: bool = Field(False, description="Pods name no user and group: the cluster assigns them, as OpenShift does.")
    monitoring_namespaces: str = Field("", description="Comma-separated namespaces that NetworkPolicies let read /metrics of the pods.")
    mesh: Mesh = Field(
        "", description="Service mesh whose tunnel NetworkPolicies let in: istio-ambient or linkerd; empty: none, or Istio with sidecars."
    )
    otlp_endpoint: str = Field(
        "",
        pattern="^(https?://[^/\\s]+.*)?$",
        description="URL of an OpenTelemetry collector: traces of workers, routers, reconciles.",
    )
    rollout_paused: bool = Field(False, description="Update no further service with rollout.engineVersion Auto to new images.")
    rollout_max_services: int = Field(3, ge=1, le=1000, description="Services that are updated to new images at the same time.")
    rollout_max_surge_gpus: int | None = Field(
        None, ge=0, le=100_000, description="GPUs that these updates may use in addition, for surge workers and canaries; absent: no limit."
    )
    rollout_observation_seconds: float = Field(
        120, ge=0, le=86_400, description="Seconds that an updated service is observed before another takes its place."
    )
    rollout_max_error_rate_increase: str = Field(
        "1%", pattern=PERCENTAGE, description="Failed requests beyond their percentage before an update, at which it is undone."
    )
    hub_endpoint: str = Field(
        "https://huggingface.co",
        pattern="^(https?://[^/\\s]+.*)?$",
        description="URL of the hub that resolves branches of hf:// models to commits; empty: each worker does.",
    )
    health_port: int = Field(8081, ge=0, le=65535, description="Port of /healthz, /readyz and /metrics; 0: any free port.")
    kubeconfig: str = Field("", description="Kubeconfig file; empty: the pod's service account, or $KUBECONFIG.")
    log_level: LogLevel = Field("INFO", description="What is logged.")
    log_format: LogFormat = Field("text", description="json: one JSON object a line.")

    @field_validator("redis_url")
    @classmethod
    def _no_password(cls, value: str) -> str:
        if value:
            parse_url(value)
        if has_password(value):
            raise ValueError("contains a password, which every pod's arguments would show: use --redis-credentials")
        return value

    @model_validator(mode="after")
    def _needs_a_secret(self) -> Self:
        if self.redis_bundled and not self.credentials_secret:
            raise ValueError("--redis-bundled needs --credentials-secret, which holds the administrator's password")
        return self

    @property
    def watched_namespaces(self) -> tuple[str, ...]:
        """Namespaces to list and watch; an empty name stands for all."""
        return tuple(dict.fromkeys(_names(self.namespaces))) or ("",)

    @property
    def settings(self) -> Settings:
        return Settings(
            worker_image=self.worker_image,
            worker_gpu_image=self.worker_gpu_image,
            vllm_image=self.vllm_image,
            sglang_image=self.sglang_image,
            router_image=self.router_image,
            image_pull_policy=self.image_pull_policy,
            image_pull_secrets=_names(self.image_pull_secrets),
            redis_url=self.redis_url,
            redis_credentials=bool(self.redis_url and self.credentials_secret),
            default_gpus=self.default_gpus,
            cluster_domain=self.cluster_domain,
            assigned_user_ids=self.assigned_user_ids,
            operator_namespace=self.lease_namespace,
            monitoring_namespaces=_names(self.monitoring_namespaces),
            mesh=self.mesh,
            otlp_endpoint=self.otlp_endpoint,
            waves=WaveLimits(
                self.rollout_paused,
                self.rollout_max_services,
                self.rollout_max_surge_gpus,
                self.rollout_observation_seconds,
                percentage(self.rollout_max_error_rate_increase),
            ),
        )


def _names(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())

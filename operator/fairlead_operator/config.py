"""The operator's configuration: flags and, for each, an environment variable FAIRLEAD_<FLAG>; flags win."""

from typing import Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fairlead_index.access import has_password, parse
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
    redis_username: str = Field("", description="User of Redis; empty: default.")
    redis_secret: str = Field("", description="Secret with its password and certificates, in the namespace of every service; empty: none.")
    redis_secret_password_key: str = Field("password", description="Key of the password in it; empty: none is asked for.")
    redis_secret_ca_key: str = Field("", description="Key of the authorities that verify a rediss:// server; empty: the image's own.")
    redis_secret_cert_key: str = Field("", description="Key of a client certificate.")
    redis_secret_key_key: str = Field("", description="Key of its private key.")
    default_gpus: int = Field(1, ge=0, le=64, description="GPUs of a worker whose manifest says nothing, times engine.tensorParallel.")
    namespace: str = Field("", description="Watch this namespace only; empty: all.")
    lease_namespace: str = Field("", description="Where the Lease is by which one operator leads; empty: the pod's own namespace.")
    lease_name: str = Field("fairlead-operator", min_length=1, description="Operators that share a Lease act one at a time.")
    cluster_domain: str = Field("cluster.local", min_length=1, description="DNS domain of the cluster.")
    monitoring_namespaces: str = Field("", description="Comma-separated: namespaces that NetworkPolicies let read /metrics of the pods.")
    health_port: int = Field(8081, ge=0, le=65535, description="Port of /healthz, /readyz and /metrics; 0: a free one.")
    kubeconfig: str = Field("", description="Where the API server is; empty: the pod's service account, or $KUBECONFIG.")
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="What is logged.")

    @field_validator("redis_url")
    @classmethod
    def _no_password(cls, value: str) -> str:
        if value:
            parse(value)
        if has_password(value):
            raise ValueError(
                "holds a password, and would show it in every pod's arguments: put it into a Secret, and name that by --redis-secret"
            )
        return value

    @model_validator(mode="after")
    def _certificates(self) -> Self:
        keys = {"--redis-secret-ca-key": self.redis_secret_ca_key, "--redis-secret-cert-key": self.redis_secret_cert_key}
        keys["--redis-secret-key-key"] = self.redis_secret_key_key
        given = [flag for flag, key in keys.items() if key]
        if given and not self.redis_secret:
            raise ValueError(f"{given[0]} is a key of a Secret: name that by --redis-secret")
        if given and not self.redis_url.startswith("rediss"):
            raise ValueError(f"{given[0]} is for TLS: give a rediss:// URL")
        if bool(self.redis_secret_cert_key) != bool(self.redis_secret_key_key):
            raise ValueError("--redis-secret-cert-key and --redis-secret-key-key go together")
        return self

    @property
    def settings(self) -> Settings:
        return Settings(
            worker_image=self.worker_image,
            router_image=self.router_image,
            image_pull_policy=self.image_pull_policy,
            redis_url=self.redis_url,
            redis_username=self.redis_username,
            redis_secret=self.redis_secret,
            redis_secret_password_key=self.redis_secret_password_key,
            redis_secret_ca_key=self.redis_secret_ca_key,
            redis_secret_cert_key=self.redis_secret_cert_key,
            redis_secret_key_key=self.redis_secret_key_key,
            default_gpus=self.default_gpus,
            cluster_domain=self.cluster_domain,
            operator_namespace=self.lease_namespace,
            monitoring_namespaces=tuple(name.strip() for name in self.monitoring_namespaces.split(",") if name.strip()),
        )

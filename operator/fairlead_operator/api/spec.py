"""`spec` of an InferenceService. Every field here takes effect: a field that is accepted and does nothing would be a lie."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from fairlead_operator.api.adapters import MODELS_NAME, MOST, SAME_NAMES, Adapter, named_twice, unnamed
from fairlead_operator.api.cache import Endpoint, ModelCache, Region, downloaded, from_bucket
from fairlead_operator.api.engine import Engine
from fairlead_operator.api.exposure import Exposure
from fairlead_operator.api.fields import Argument, Duration, ObjectName, Part, Quantity, known_uri, refuse, rule, rules, seconds, uri_schema
from fairlead_operator.api.rollout import Rollout
from fairlead_operator.api.scaling import EXCLUSIVE, Scaling

# What the rules say, in the CRD and here.
_REVISION = "spec.model.revision is for hf:// models, and not together with @REVISION in spec.model.uri: keep one of the two"
_SECRET = "spec.model.secretRef is for hf:// models (the hub's token) and s3:// models (a key): remove it"
_CACHE = "spec.model.cache keeps downloads and is for hf:// and s3:// models: remove it (others are read in place)"
_BUCKET = "spec.model.endpoint and region are for s3:// models: remove them"
_PARALLEL = (
    "spec.engine.tensorParallel must equal spec.resources.gpus: a worker uses all of its GPUs for one replica "
    "(over several nodes: gpus times spec.engine.nodes)"
)
_WHOLE = "spec.rollout.canary is for workers of one pod: remove it, or set spec.engine.nodes to 1"
_INT8 = "spec.engine.quantization int8 is for workers on CPUs: set spec.resources.gpus to 0, or remove one of the two"
_FP8 = "spec.engine.quantization fp8 is for workers on GPUs: set it to int8 or int4, or set spec.resources.gpus above 0"
_MIRROR = "spec.routing.indexMode Mirror follows one group of the index: set spec.routing.indexGroups to 1, or indexMode to Auto or Remote"
_UNREAD = "spec.routing.indexMode says how PrefixAware reads the index: remove it, or set spec.routing.policy to PrefixAware"
_TTFT = "spec.routing.maxExpectedTtft must be above 0s: remove it to refuse no request"
_PAST_KEYS = (
    "spec.routing.steering Redirect goes past spec.access.keysSecretRef, since workers check no keys: "
    "set spec.routing.steering to Proxy, or remove spec.access"
)
_UNSEEN = (
    "spec.routing.steering Redirect lets the routers see no answer, by which spec.rollout.canary is judged: "
    "set spec.routing.steering to Proxy, or remove spec.rollout.canary"
)
_LENGTH = "spec.engine.maxModelLen must be 0 (the model's own) or at least spec.engine.kvCache.pageTokens"


class SecretKey(Part):
    """A key of a Secret in the service's namespace. The kubelet reads it; the operator never does."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: str = Field("token", min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$", description="Key within the Secret.")


class Model(Part):
    """The model to serve."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.revision) || (self.uri.startsWith('hf://') && !self.uri.contains('@'))",
                _REVISION,
                path=".revision",
            ),
            rule(
                "!has(self.secretRef) || self.uri.matches('^(hf|s3)://')",
                _SECRET,
                path=".secretRef",
            ),
            rule(
                "!has(self.cache) || self.uri.matches('^(hf|s3)://')",
                _CACHE,
                path=".cache",
            ),
            rule(f"!has(self.name) || {unnamed('self', 'self.name')}", MODELS_NAME, path=".adapters"),
            rule("!(has(self.endpoint) || has(self.region)) || self.uri.startsWith('s3://')", _BUCKET, path=".endpoint"),
        )
    )

    uri: Annotated[str, known_uri("spec.model.uri"), uri_schema("spec.model.uri")] = Field(
        description="hf://ORG/NAME[@REVISION], s3://BUCKET/FOLDER, pvc://CLAIM/PATH (mounted read-only), oci://IMAGE[#FOLDER] or "
        "file:///PATH."
    )
    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")] | None = Field(
        None, description='What clients send as "model". Default: the name of the service.'
    )
    revision: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] | None = Field(
        None, description="Commit, tag or branch of an hf:// model."
    )
    secret_ref: SecretKey | None = Field(
        None,
        description="hf://: the hub's token, as HF_TOKEN. s3://: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; absent: the pod's role.",
    )
    cache: ModelCache | None = Field(None, description="Where downloads are kept. Absent: in the pod, downloaded again by every new pod.")
    adapters: list[Adapter] = Field(
        default_factory=list,
        max_length=MOST,
        description="LoRA adapters, loaded before a worker is ready. A change is a rollout.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )

    endpoint: Endpoint | None = Field(None, description="Of an S3-compatible store, such as https://minio.storage:9000. Absent: AWS.")
    region: Region | None = Field(None, description="Of the bucket. Absent: us-east-1.")

    @model_validator(mode="after")
    def _for_its_source(self) -> Self:
        hub = self.uri.startswith("hf://")
        refuse((self.endpoint is not None or self.region is not None) and not from_bucket(self.uri), _BUCKET)
        refuse(self.revision is not None and (not hub or "@" in self.uri), _REVISION)
        refuse(self.secret_ref is not None and not downloaded(self.uri), _SECRET)
        refuse(self.cache is not None and not downloaded(self.uri), _CACHE)
        refuse(named_twice(self.adapters), SAME_NAMES)
        refuse(self.name in {one.name for one in self.adapters}, MODELS_NAME)
        return self


class Resources(Part):
    """What each worker asks of its node."""

    gpus: Annotated[int, Field(ge=0, le=64)] | None = Field(
        None, description="GPUs of each pod of a worker; 0: on the CPU. Absent: the operator's default (1) times tensorParallel / nodes."
    )
    cpu: Quantity | None = Field(
        None, description="CPU request of each worker, such as 8 or 500m. No limit is set: throttling delays every token."
    )
    memory: Quantity | None = Field(None, description="Memory request and limit of each worker, such as 64Gi.")
    gpu_type: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")] | None = Field(
        None, description="The nodes' label nvidia.com/gpu.product, such as NVIDIA-H100-80GB-HBM3. Absent: any."
    )


class Routing(Part):
    """How the router chooses a worker."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("self.indexMode != 'Mirror' || self.indexGroups == 1", _MIRROR, path=".indexMode"),
            rule("self.indexMode == 'Auto' || self.policy == 'PrefixAware'", _UNREAD, path=".indexMode"),
        )
    )

    policy: Literal["PrefixAware", "LeastLoad", "Random", "RoundRobin", "Session"] = Field(
        "PrefixAware", description="PrefixAware: to the pod where the request will start soonest, given what its KV cache holds."
    )
    index_mode: Literal["Auto", "Mirror", "Remote"] = Field(
        "Auto",
        description="How PrefixAware reads the index: Remote asks Redis for each request, Mirror keeps a copy in each router and steers on"
        " while Redis is away, Auto keeps a copy while it is small.",
    )
    replicas: int = Field(2, ge=1, le=64, description="Router pods. They share nothing but the index: any number works.")
    index_groups: int = Field(
        1,
        ge=1,
        le=64,
        description="Parts of the index, each on one shard of a Redis Cluster. 1 is enough for 100,000 block changes a second.",
    )
    hold_timeout: Duration = Field(
        "30s",
        description="How long requests are held while no worker is ready. At the default, up to 10m while our autoscaler's workers start.",
    )
    max_expected_ttft: Annotated[Duration, Field(json_schema_extra=rules(rule("duration(self) > duration('0s')", _TTFT)))] | None = Field(
        None, description="Requests whose first token is expected later than this get 429 with Retry-After. Absent: never."
    )
    args: list[Argument] = Field(default_factory=list, max_length=64, description="Further router flags; the last one given wins.")
    steering: Literal["Proxy", "Redirect"] = Field(
        "Proxy", description="Redirect: clients inside the cluster are sent to the pod (307); no retries, no keys, no queue."
    )
    metrics_names: Literal["Fairlead", "vLLM"] = Field(
        "Fairlead", description="vLLM: metrics also under the names of vLLM's production stack."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(self.index_mode == "Mirror" and self.index_groups > 1, f"{_MIRROR} (got {self.index_groups})")
        refuse(self.index_mode != "Auto" and self.policy != "PrefixAware", f"{_UNREAD} (it is {self.policy})")
        refuse(self.max_expected_ttft is not None and seconds(self.max_expected_ttft) <= 0, _TTFT)
        return self


class KeysSecret(Part):
    """A Secret in the service's namespace with a key file, as `fairlead keys new` makes it. The operator never reads it."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: str = Field("keys.yaml", min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$", description="Key within the Secret.")


class Access(Part):
    """Who may ask."""

    keys_secret_ref: KeysSecret = Field(
        description="Tenants and their hashed API keys. A change is used within a minute, without restarts."
    )


class Disruption(Part):
    """What node drains may take away at once."""

    max_unavailable: int = Field(1, ge=0, le=1000, description="Workers that may be evicted at the same time. 0 forbids evictions.")


class PodMetadata(Part):
    """Further labels and annotations of the workers."""

    labels: dict[str, Annotated[str, Field(max_length=63)]] = Field(
        default_factory=dict, max_length=64, description="Added to the workers' labels."
    )
    annotations: dict[str, Annotated[str, Field(max_length=4096)]] = Field(
        default_factory=dict, max_length=64, description="Added to the workers' annotations."
    )


class PodTemplate(Part):
    """What Kubernetes offers for pods and this manifest has no field for: tolerations, nodeSelector, volumes, sidecars."""

    metadata: PodMetadata = Field(default_factory=PodMetadata, description="Further labels and annotations of the workers.")
    spec: dict[str, Any] = Field(
        default_factory=dict,
        description="A PodSpec, merged by the names of containers (the worker's is called worker), volumes, env and mounts.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True, "maxProperties": 64, "additionalProperties": False},
    )


class ServiceSpec(Part):
    """What should be served."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.resources.gpus) || self.resources.gpus * self.engine.nodes == self.engine.tensorParallel "
                "|| (self.resources.gpus == 0 && self.engine.tensorParallel == 1)",
                _PARALLEL,
                path=".engine.tensorParallel",
            ),
            rule(
                "self.engine.quantization != 'int8' || !has(self.resources.gpus) || self.resources.gpus == 0",
                _INT8,
                path=".engine.quantization",
            ),
            rule(
                "self.engine.quantization != 'fp8' || !has(self.resources.gpus) || self.resources.gpus > 0",
                _FP8,
                path=".engine.quantization",
            ),
            rule(
                "self.engine.maxModelLen == 0 || self.engine.maxModelLen >= self.engine.kvCache.pageTokens",
                _LENGTH,
                path=".engine.maxModelLen",
            ),
            rule("!has(self.access) || self.routing.steering == 'Proxy'", _PAST_KEYS, path=".routing.steering"),
            rule("!has(self.rollout.canary) || self.engine.nodes == 1", _WHOLE, path=".engine.nodes"),
            rule("!has(self.rollout.canary) || self.routing.steering == 'Proxy'", _UNSEEN, path=".routing.steering"),
            rule("!has(self.scaling) || !has(self.scaling.target) || self.replicas == 1", EXCLUSIVE, path=".replicas"),
        )
    )

    model: Model = Field(description="The model to serve; model.uri alone is a complete manifest.")
    replicas: int = Field(1, ge=0, le=1000, description="Workers. This is the field that kubectl scale and autoscalers write.")
    scaling: Scaling | None = Field(None, description="Bounds for replicas, whoever sets them; with target the operator does.")
    engine: Engine = Field(default_factory=Engine, description="How a worker computes.")
    resources: Resources = Field(default_factory=Resources, description="What each worker asks of its node.")
    routing: Routing = Field(default_factory=Routing, description="How the router chooses a worker.")
    access: Access | None = Field(None, description="Who may ask. Absent: everybody who reaches the Service.")
    exposure: Exposure = Field(default_factory=Exposure, description="Who reaches the service over the network.")
    rollout: Rollout = Field(default_factory=Rollout, description="How pods are replaced.")
    disruption: Disruption = Field(default_factory=Disruption, description="What node drains may take away at once.")
    image_pull_secrets: list[ObjectName] = Field(default_factory=list, max_length=8, description="Secrets to pull images with.")
    pod_template: PodTemplate | None = Field(None, description="Merged last into the workers' pod template.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        gpus, parallel, nodes = self.resources.gpus, self.engine.tensor_parallel, self.engine.nodes
        alone = gpus == 0 and parallel == 1
        over = f" times {nodes}" if nodes > 1 else ""
        refuse(gpus is not None and gpus * nodes != parallel and not alone, f"{_PARALLEL}: {parallel} is not {gpus}{over}")
        refuse(self.engine.quantization == "int8" and bool(gpus), f"{_INT8}: {gpus} GPUs")
        refuse(self.engine.quantization == "fp8" and gpus == 0, _FP8)
        refuse(0 < self.engine.max_model_len < self.engine.kv_cache.page_tokens, f"{_LENGTH}: {self.engine.max_model_len} is less")
        refuse(self.access is not None and self.routing.steering == "Redirect", _PAST_KEYS)
        refuse(self.rollout.canary is not None and nodes > 1, f"{_WHOLE} (got {nodes})")
        refuse(self.rollout.canary is not None and self.routing.steering == "Redirect", _UNSEEN)
        refuse(self.scaling is not None and self.scaling.target is not None and self.replicas != 1, f"{EXCLUSIVE} (got {self.replicas})")
        return self

    @property
    def wanted_replicas(self) -> int:
        """`replicas` within the bounds of `scaling`."""
        return self.replicas if self.scaling is None else self.scaling.within(self.replicas)

"""`spec` of an InferenceService. Every field takes effect in this release."""

import re
from typing import Annotated, Literal

from pydantic import Field

from fairlead_common.routing_policy import DESCRIPTION, RoutingPolicy
from fairlead_operator.api.batch import Batch
from fairlead_operator.api.disruption import PodDisruptionBudget
from fairlead_operator.api.engine import Engine
from fairlead_operator.api.exposure import Exposure
from fairlead_operator.api.fields import Argument, Image, ObjectName, Part, list_map, list_set, refuse, rule, ruled
from fairlead_operator.api.model import Model
from fairlead_operator.api.owned_flags import PIPELINE, pipeline_stages
from fairlead_operator.api.pod_template import PodTemplate
from fairlead_operator.api.resources import MIG, MIG_PARALLEL, Resources
from fairlead_operator.api.rollout import Rollout
from fairlead_operator.api.router import Router
from fairlead_operator.api.scaling import EXCLUSIVE, Scaling
from fairlead_operator.api.slo import Slo

# Messages of the rules, in the CRD and in the validators below.
_PARALLEL = (
    "spec.engine.tensorParallel must equal spec.resources.gpus times spec.engine.nodes, since a worker uses all of its GPUs for one "
    "replica: change one of them"
)
_STAGES = (
    "spec.resources.gpus must equal spec.engine.tensorParallel times the pipeline stages in spec.engine.args, since a worker uses all of "
    "its GPUs for one replica: change one of them"
)
_CANARY_NODES = "spec.rollout.canary does not support workers of several pods: remove it, or set spec.engine.nodes to 1"
_INT8 = "spec.engine.quantization Int8 is for workers on CPUs: set spec.resources.gpus to 0, or choose FP8 or Int4"
_FP8 = "spec.engine.quantization FP8 is for workers on GPUs: choose Int8 or Int4, or set spec.resources.gpus above 0"
_NO_INDEX = "spec.routing.indexMode configures policy PrefixAware: remove it, or set spec.routing.policy to PrefixAware"
_REDIRECT = (
    "spec.routing.forwardingMode Redirect sends clients to workers, past the routers, which apply spec.access, spec.slo, "
    "spec.rollout.canary, spec.router.tls and spec.exposure.otherServices: set it to Proxy, or remove these"
)
_ROUTERS = "spec.router.autoscaling.maxReplicas must be at least spec.routing.replicas, the fewest routers: change one of the two"
_ENGINE_SOURCE = (
    "spec.model.uri of runtime VLLM and SGLang must be an hf://, pvc://, oci:// or file:// model: copy the model from "
    "the bucket to a claim (pvc://CLAIM/PATH)"
)
_ENGINE_GGUF = (
    "spec.model.uri of runtime VLLM and SGLang must not name a .gguf file, which only Fairlead's engine serves: name a folder with "
    "safetensors, or set spec.engine.runtime to Fairlead"
)
_GGUF = r"\.gguf(@.*)?$"
_ENGINE_ADAPTERS = (
    "spec.model.adapters of runtime VLLM must be hf://ORG/NAME without @REVISION, pvc://, oci:// or file://, since vLLM downloads no "
    "others: copy the adapter to a claim"
)
_SGLANG_ADAPTERS = (
    "spec.model.adapters is not for runtime SGLang, whose KV events do not name adapters: remove it, or set spec.engine.runtime to VLLM"
)
_SGLANG_ACCESS = (
    "spec.access is not for runtime SGLang, whose KV events do not name the salts that separate tenants: remove it, or set "
    "spec.engine.runtime to VLLM"
)
_CONTAINERS = (
    "spec.podTemplate.spec.containers of runtime VLLM and SGLang must have neither worker nor engine: the engine is in initContainers, as "
    "engine, and the container that serves is agent"
)
_LENGTH = "spec.engine.maxModelLen must be at least spec.engine.kvCache.pageTokens: increase it, or remove it for the limit of the model"


ENGINE_REFUSES = "^(s3|gs)://|^hf://.*@"
"""Adapters that vLLM does not download."""


class Routing(Part):
    """How routers select a worker for a request."""

    model_config = ruled(rule("self.indexMode == 'Auto' || self.policy == 'PrefixAware'", _NO_INDEX, path=".indexMode"))

    policy: RoutingPolicy = Field("PrefixAware", description=f"{DESCRIPTION}.")
    index_mode: Literal["Auto", "Mirror", "Remote"] = Field(
        "Auto",
        description="Index of PrefixAware. Remote: in Redis. Mirror: a copy, also while Redis is down. Auto: Mirror while it is small.",
    )
    image: Image | None = Field(None, description="Image of the routers. Absent: the operator's, by rollout.engineVersion.")
    replicas: int = Field(2, ge=1, le=64, description="Router pods. Any number works. With router.autoscaling: the fewest.")
    hold_timeout_seconds: int = Field(
        30,
        ge=0,
        le=86_400,
        description="How long requests wait for a ready worker. Default with a scaling target: 600 while workers start.",
    )
    args: list[Argument] = Field(
        default_factory=list, max_length=64, description="More flags of fairlead-router. The last value of a flag is used."
    )
    forwarding_mode: Literal["Proxy", "Redirect"] = Field("Proxy", description="Redirect: clients in the cluster get a 307 to the worker.")
    metrics_names: Literal["Fairlead", "VLLM"] = Field(
        "Fairlead", description="VLLM: metrics have the names of vLLM's production stack too."
    )

    def check_rules(self) -> None:
        refuse(self.index_mode != "Auto" and self.policy != "PrefixAware", f"{_NO_INDEX} (it is {self.policy})")


class KeysSecret(Part):
    """A Secret in the namespace of the service with a key file of `fairlead keys new`. The operator never reads it."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: str = Field("keys.yaml", min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$", description="Key within the Secret.")


class Access(Part):
    """Authentication of clients."""

    keys_secret_ref: KeysSecret = Field(description="Tenants and hashed API keys. Routers apply a change within a minute.")


class LocalObjectReference(Part):
    """A reference to an object in the namespace of the service."""

    name: ObjectName = Field(description="Name of the object.")


class ProfileRef(Part):
    """The profile of the service."""

    name: ObjectName = Field(description="Name of the InferenceProfile.")
    excluded_fields: list[Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z]+(\.[a-zA-Z]+)*$")]] | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="Fields of the profile that do not apply here, such as routing.replicas.",
        json_schema_extra=list_set(),
    )


class ServiceSpec(Part):
    """The desired service."""

    model_config = ruled(
        rule(
            "!has(self.resources.gpus) || self.resources.gpus * self.engine.nodes == self.engine.tensorParallel "
            "|| (self.resources.gpus == 0 && self.engine.tensorParallel == 1) || "
            f"(self.engine.runtime != 'Fairlead' && has(self.engine.args) && self.engine.args.exists(a, a.matches('{PIPELINE}')))",
            _PARALLEL,
            path=".engine.tensorParallel",
        ),
        rule(
            f"!has(self.resources.gpuResource) || !self.resources.gpuResource.contains('{MIG}') || self.engine.tensorParallel == 1",
            MIG_PARALLEL,
            path=".engine.tensorParallel",
        ),
        rule(
            "self.engine.quantization != 'Int8' || !has(self.resources.gpus) || self.resources.gpus == 0",
            _INT8,
            path=".engine.quantization",
        ),
        rule(
            "self.engine.quantization != 'FP8' || !has(self.resources.gpus) || self.resources.gpus > 0", _FP8, path=".engine.quantization"
        ),
        rule(
            "!has(self.engine.maxModelLen) || self.engine.maxModelLen >= self.engine.kvCache.pageTokens",
            _LENGTH,
            path=".engine.maxModelLen",
        ),
        rule(
            "self.routing.forwardingMode == 'Proxy' || !(has(self.access) || has(self.slo) || has(self.rollout.canary) || "
            "has(self.router.tls) || has(self.exposure.otherServices))",
            _REDIRECT,
            path=".routing.forwardingMode",
        ),
        rule("self.engine.runtime == 'Fairlead' || !self.model.uri.matches('^(s3|gs)://')", _ENGINE_SOURCE, path=".model.uri"),
        rule(f"self.engine.runtime == 'Fairlead' || !self.model.uri.matches(r'{_GGUF}')", _ENGINE_GGUF, path=".model.uri"),
        rule(
            f"self.engine.runtime == 'Fairlead' || !has(self.model.adapters) || "
            f"self.model.adapters.all(one, !one.uri.matches('{ENGINE_REFUSES}'))",
            _ENGINE_ADAPTERS,
            path=".model.adapters",
        ),
        rule(
            "self.engine.runtime != 'SGLang' || !has(self.model.adapters) || self.model.adapters.size() == 0",
            _SGLANG_ADAPTERS,
            path=".model.adapters",
        ),
        rule("self.engine.runtime != 'SGLang' || !has(self.access)", _SGLANG_ACCESS, path=".access"),
        rule("!has(self.rollout.canary) || self.engine.nodes == 1", _CANARY_NODES, path=".engine.nodes"),
        rule("!has(self.scaling) || !has(self.scaling.target) || self.replicas == 1", EXCLUSIVE, path=".replicas"),
        rule(
            "!has(self.router.autoscaling) || self.router.autoscaling.maxReplicas >= self.routing.replicas",
            _ROUTERS,
            path=".router.autoscaling.maxReplicas",
        ),
    )

    profile_ref: ProfileRef | None = Field(None, description="InferenceProfile of the namespace, for each field that has its default here.")
    model: Model = Field(description="The model to serve. model.uri alone is a complete spec.")
    replicas: int = Field(1, ge=0, le=1000, description="Workers. kubectl scale, HPA and KEDA write this field.")
    scaling: Scaling | None = Field(None, description="Bounds of the number of workers. With target, the operator sets the number.")
    engine: Engine = Field(default_factory=Engine, description="Settings of the inference engine in each worker.")
    resources: Resources = Field(default_factory=Resources, description="Resources of each worker pod.")
    routing: Routing = Field(default_factory=Routing, description="How routers select a worker for a request.")
    router: Router = Field(default_factory=Router, description="The router pods: their template, their number under load, TLS.")
    slo: Slo | None = Field(None, description="Service classes: urgency and latency bounds of requests.")
    access: Access | None = Field(None, description="Authentication of clients. Absent: every client is served.")
    batch: Batch | None = Field(None, description="OpenAI's Batch API. Absent: none.")
    exposure: Exposure = Field(default_factory=Exposure, description="Network access to the service.")
    rollout: Rollout = Field(default_factory=Rollout, description="How pods are replaced.")
    pod_disruption_budget: PodDisruptionBudget = Field(
        default_factory=PodDisruptionBudget, description="Limit of voluntary evictions, such as node drains."
    )
    image_pull_secrets: list[LocalObjectReference] = Field(
        default_factory=list, max_length=8, description="Secrets for pulling images, as in a PodSpec.", json_schema_extra=list_map("name")
    )
    pod_template: PodTemplate | None = Field(None, description="Merged last into the template of the workers.")

    def check_rules(self) -> None:
        gpus, parallel, nodes = self.resources.gpus, self.engine.tensor_parallel, self.engine.nodes
        on_one_cpu = gpus == 0 and parallel == 1
        over = f" times {nodes}" if nodes > 1 else ""
        stages = self.pipeline_stages
        if stages > 1:
            refuse(gpus not in (None, 0, parallel * stages), f"{_STAGES} ({gpus} is not {parallel} times {stages})")
        else:
            refuse(gpus is not None and gpus * nodes != parallel and not on_one_cpu, f"{_PARALLEL} ({parallel} is not {gpus}{over})")
        refuse(self.resources.uses_mig and parallel > 1, f"{MIG_PARALLEL} (got {parallel})")
        refuse(self.engine.quantization == "Int8" and bool(gpus), f"{_INT8} (got {gpus} GPUs)")
        refuse(self.engine.quantization == "FP8" and gpus == 0, _FP8)
        limit, page = self.engine.max_model_len, self.engine.kv_cache.page_tokens
        refuse(limit is not None and limit < page, f"{_LENGTH} ({limit} is less than {page})")
        self._check_runtime()
        bypassed = (self.access, self.slo, self.rollout.canary, self.router.tls, self.exposure.other_services or None)
        refuse(self.routing.forwarding_mode == "Redirect" and any(part is not None for part in bypassed), _REDIRECT)
        refuse(self.rollout.canary is not None and nodes > 1, f"{_CANARY_NODES} (got {nodes})")
        refuse(self.scaling is not None and self.scaling.target is not None and self.replicas != 1, f"{EXCLUSIVE} (got {self.replicas})")
        routers, autoscaling = self.routing.replicas, self.router.autoscaling
        refuse(autoscaling is not None and autoscaling.max_replicas < routers, f"{_ROUTERS} (the fewest are {routers})")

    def _check_runtime(self) -> None:
        """Apply the rules of `spec.engine.runtime` over several sections."""
        runtime, adapters = self.engine.runtime, self.model.adapters
        if runtime == "Fairlead":
            return
        refuse(self.model.uri.startswith(("s3://", "gs://")), f"{_ENGINE_SOURCE} (got {self.model.uri})")
        refuse(re.search(_GGUF, self.model.uri) is not None, f"{_ENGINE_GGUF} (got {self.model.uri})")
        refuse(any(re.match(ENGINE_REFUSES, one.uri) for one in adapters), _ENGINE_ADAPTERS)
        refuse(runtime == "SGLang" and bool(adapters), _SGLANG_ADAPTERS)
        refuse(runtime == "SGLang" and self.access is not None, _SGLANG_ACCESS)
        containers = (self.pod_template.spec.get("containers") if self.pod_template is not None else None) or []
        named = [one.get("name") for one in containers if isinstance(one, dict)]
        refuse("worker" in named or "engine" in named, f"{_CONTAINERS} (got {', '.join(map(str, named))})")

    @property
    def pipeline_stages(self) -> int:
        return pipeline_stages(self.engine.args, self.engine.runtime)

    @property
    def most_replicas(self) -> int:
        """Return the most workers that there may be, at least 1."""
        return max(1, self.replicas, self.scaling.max_replicas if self.scaling is not None else 0)

    @property
    def desired_replicas(self) -> int:
        """Return `replicas`, limited to the bounds of `scaling`."""
        return self.replicas if self.scaling is None else self.scaling.within(self.replicas)

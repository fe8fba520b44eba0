"""`spec.engine`: settings of the inference engine in each worker."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from fairlead_common.scheduling_policy import SchedulingPolicy
from fairlead_operator.api.engine_runtime import EnvironmentVariable, Runtime, engine_rules, refuse_unsupported
from fairlead_operator.api.fields import Argument, Image, Part, Quantity, list_map, refuse, rule, ruled, rules, uri_schema, uri_validator
from fairlead_operator.api.owned_flags import refuse_owned_flags

_SIZES = "spec.engine.kvCache.size and spec.engine.kvCache.pages both set the size: keep one of the two"
_BLOCKS = "spec.engine.kvCache.blockTokens must be a multiple of spec.engine.kvCache.pageTokens: change one of the two"
_DRAFT_URI = "spec.engine.speculativeDecoding.draftModelURI"
_DRAFT = f"{_DRAFT_URI} is required for method Draft and not allowed for other methods: add it, or remove it"
_EVEN = "spec.engine.tensorParallel must be a multiple of spec.engine.nodes: each node holds the same number of GPUs of a replica"
_IMMUTABLE = (
    "spec.engine.nodes cannot be changed, because another kind of object manages the pods: create another service, or delete this one"
)


class KvCache(Part):
    """Size, granularity and data type of the KV cache."""

    model_config = ruled(
        rule("self.blockTokens % self.pageTokens == 0", _BLOCKS, path=".blockTokens"),
        rule("!(has(self.size) && has(self.pages))", _SIZES, path=".pages"),
    )

    page_tokens: int = Field(16, ge=1, le=1024, examples=[32], description="Tokens in a page, the unit of KV cache allocation.")
    block_tokens: int = Field(
        64, ge=1, le=4096, examples=[128], description="Tokens in a block, the unit of the prefix index. A multiple of pageTokens."
    )
    size: Quantity | None = Field(
        None, examples=["20Gi"], description="KV cache of each worker, such as 40Gi. Absent: what a GPU has left; on CPUs at most 4Gi."
    )
    pages: Annotated[int, Field(ge=1, le=1 << 30)] | None = Field(
        None, examples=[4096], description="Pages of the KV cache in each worker, as an alternative to size."
    )
    dtype: Literal["Auto", "FP8"] = Field(
        "Auto", examples=["FP8"], description="Data type of keys and values. Auto: that of activations. FP8: half of the memory, for GPUs."
    )
    host_size: Quantity | None = Field(
        None, examples=["64Gi"], description="Host memory for pages evicted from the GPU, part of resources.memory. Absent: none."
    )

    def check_rules(self) -> None:
        refuse(self.block_tokens % self.page_tokens != 0, f"{_BLOCKS} ({self.block_tokens} is not a multiple of {self.page_tokens})")
        refuse(self.size is not None and self.pages is not None, _SIZES)


class SpeculativeDecoding(Part):
    """Speculative decoding: tokens are drafted and verified in one step. Outputs do not change."""

    model_config = ruled(rule("(self.method == 'Draft') == has(self.draftModelURI)", _DRAFT, path=".draftModelURI"))

    method: Literal["NGram", "Draft"] = Field(description="NGram: drafts are copied from the request. Draft: a smaller model drafts.")
    draft_model_uri: Annotated[str, uri_validator(_DRAFT_URI), uri_schema(_DRAFT_URI)] | None = Field(
        None, description="Draft model with the same tokenizer, as spec.model.uri. Required for Draft."
    )

    def check_rules(self) -> None:
        refuse((self.method == "Draft") != (self.draft_model_uri is not None), f"{_DRAFT} (method is {self.method})")


def _add_rules(schema: dict[str, Any], engine: type[Any]) -> None:
    schema |= rules(
        rule("self.tensorParallel % self.nodes == 0", _EVEN, path=".tensorParallel"),
        rule("self.nodes == oldSelf.nodes", _IMMUTABLE, path=".nodes"),
        *engine_rules(engine),
    )


class Engine(Part):
    """Settings of the inference engine in each worker."""

    model_config = ConfigDict(json_schema_extra=_add_rules)

    runtime: Runtime = Field(
        "Fairlead", examples=["VLLM", "SGLang"], description="Engine of the workers. VLLM and SGLang run with an agent beside them."
    )
    image: Image | None = Field(
        None,
        examples=["registry.example:5000/worker@sha256:0a"],
        description="Image of the engine. Absent: the operator's, by rollout.engineVersion.",
    )
    max_model_len: Annotated[int, Field(ge=1, le=16_777_216)] | None = Field(
        None, examples=[4096], description="Most tokens of prompt and output together. Absent: the limit of the model."
    )
    max_num_seqs: int = Field(256, ge=1, le=65_536, examples=[8], description="Most sequences that run at the same time in one worker.")
    chunked_prefill_size: Annotated[int, Field(ge=1, le=1_048_576)] | None = Field(
        None, examples=[1024], description="Most prompt tokens in one step beside decodes. Absent: measured on a GPU, 512 on a CPU."
    )
    max_prefill_tokens: int = Field(
        8192, ge=1, le=16_777_216, examples=[4096], description="Most prompt tokens in one step, over all requests."
    )
    max_waiting_requests: int = Field(
        1024, ge=1, le=1_048_576, examples=[8], description="Most sequences that wait in one worker. More are refused."
    )
    itl_target_milliseconds: Annotated[int, Field(ge=1, le=60_000)] | None = Field(
        None,
        examples=[30],
        description="Target inter-token latency (ITL), which sizes prefill chunks. Absent: whole chunks; on CPUs three decode steps.",
    )
    dtype: Literal["Auto", "Float32", "BFloat16", "Float16"] = Field(
        "Auto", examples=["BFloat16"], description="Data type of weights and activations. Auto: the type of the stored weights."
    )
    quantization: Literal["None", "Int8", "Int4", "FP8"] = Field(
        "None", examples=["FP8", "Int4"], description="Quantizes linear layers at load. Int8 is for CPUs, FP8 for GPUs, Int4 for both."
    )
    scheduling_policy: SchedulingPolicy | None = Field(
        None,
        examples=["FirstComeFirstServed", "LongestPrefixMatch"],
        description="Order of waiting requests of equal priority. Absent: LongestPrefixMatch, or the order of vLLM or SGLang.",
    )
    tensor_parallel: int = Field(
        1, ge=1, le=64, examples=[2], description="GPUs that share one replica of the model. Equals resources.gpus times engine.nodes."
    )
    nodes: int = Field(
        1,
        ge=1,
        le=64,
        examples=[2],
        description="Nodes that share one replica, with one pod on each. Above 1 needs LeaderWorkerSet. Immutable.",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, examples=[4], description="CPU threads of a worker. Absent: from its cores and quota."
    )
    warmup_tokens: int = Field(
        8192,
        ge=0,
        le=1_048_576,
        examples=[0],
        description="Tokens of the most used prefixes that a new worker computes before it is ready.",
    )
    kv_cache: KvCache = Field(default_factory=lambda: KvCache(), description="Size, granularity and data type of the KV cache.")
    speculative_decoding: SpeculativeDecoding | None = Field(
        None, examples=[{"method": "NGram"}], description="Speculative decoding. Absent: off."
    )
    args: list[Argument] = Field(
        default_factory=list,
        max_length=64,
        examples=[["--flag=value"]],
        description="Additional flags of the engine. The last value of a flag is used.",
    )
    env: list[EnvironmentVariable] = Field(
        default_factory=list,
        max_length=64,
        examples=[[{"name": "A", "value": "1"}]],
        description="Variables of the engine's container. They override the operator's.",
        json_schema_extra=list_map("name"),
    )

    def check_rules(self) -> None:
        refuse_unsupported(self)
        refuse_owned_flags(self.args, self.runtime)
        refuse(self.tensor_parallel % self.nodes > 0, f"{_EVEN} ({self.tensor_parallel} is not a multiple of {self.nodes})")

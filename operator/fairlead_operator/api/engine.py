"""`spec.engine`: how a worker computes."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from fairlead_operator.api.fields import Argument, Part, Quantity, known_uri, refuse, rule, rules, uri_schema

_SIZES = "spec.engine.kvCache.size and spec.engine.kvCache.pages say the same thing: keep one of the two"
_BLOCKS = "spec.engine.kvCache.blockTokens must be a multiple of spec.engine.kvCache.pageTokens"
_DRAFT = "spec.engine.speculative.model is the draft model: method draft needs it, and no other method takes one"
_EVEN = "spec.engine.tensorParallel must be a multiple of spec.engine.nodes: each node has as many GPUs of a replica"
_SETTLED = "spec.engine.nodes cannot be changed, since other kinds of objects hold the pods: make another service, or delete this one first"
_TARGET = "spec.engine.itlTargetMs cuts prompts into chunks: it needs spec.engine.chunkedPrefillSize above 0"


class KvCache(Part):
    """The pages that keys and values live in, and the blocks that the index speaks of."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.blockTokens % self.pageTokens == 0",
                _BLOCKS,
                path=".blockTokens",
            ),
            rule(
                "!(has(self.size) && has(self.pages))",
                _SIZES,
                path=".pages",
            ),
        )
    )

    page_tokens: int = Field(16, ge=1, le=1024, description="Tokens of one page, the unit of KV allocation.")
    block_tokens: int = Field(64, ge=1, le=4096, description="Tokens of one block, the unit of the prefix index; a multiple of pageTokens.")
    size: Quantity | None = Field(None, description="Memory of each worker's KV cache, such as 40Gi. Absent: what the device has left.")
    pages: Annotated[int, Field(ge=1, le=1 << 30)] | None = Field(None, description="Pages of each worker's KV cache, instead of size.")
    host_size: Quantity | None = Field(
        None, description="Host memory of each worker for pages evicted from the GPU, such as 64Gi; part of resources.memory. Absent: none."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(self.block_tokens % self.page_tokens != 0, f"{_BLOCKS}: {self.block_tokens} is not a multiple of {self.page_tokens}")
        refuse(self.size is not None and self.pages is not None, _SIZES)
        return self


class Speculative(Part):
    """Who guesses tokens ahead. Outputs stay the same; guesses that prove right save steps."""

    model_config = ConfigDict(json_schema_extra=rules(rule("(self.method == 'draft') == has(self.model)", _DRAFT, path=".model")))

    method: Literal["ngram", "draft"] = Field(description="ngram: looked up in the request's own text; draft: guessed by a smaller model.")
    num_tokens: int = Field(5, ge=1, le=64, description="Most tokens guessed ahead of one request in a step.")
    model: Annotated[str, known_uri("spec.engine.speculative.model"), uri_schema("spec.engine.speculative.model")] | None = Field(
        None, description="The draft model, with the same tokenizer: a URI as of spec.model. For method draft, and only for it."
    )

    @model_validator(mode="after")
    def _drafting(self) -> Self:
        refuse((self.method == "draft") != (self.model is not None), f"{_DRAFT} (method is {self.method})")
        return self


class Engine(Part):
    """How a worker computes. The fields are the worker's flags of the same names."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("self.itlTargetMs == 0 || self.chunkedPrefillSize > 0", _TARGET, path=".itlTargetMs"),
            rule("self.tensorParallel % self.nodes == 0", _EVEN, path=".tensorParallel"),
            rule("self.nodes == oldSelf.nodes", _SETTLED, path=".nodes"),
        )
    )

    max_model_len: int = Field(0, ge=0, le=16_777_216, description="Longest prompt plus output in tokens. 0: what the model was made for.")
    max_num_seqs: int = Field(256, ge=1, le=65_536, description="Most requests running at once in one worker.")
    chunked_prefill_size: int = Field(
        512, ge=-1, le=1_048_576, description="Prompt tokens computed in one step beside the running decodes. 0 or -1: whole prompts."
    )
    max_prefill_tokens: int = Field(8192, ge=1, le=16_777_216, description="Most prompt tokens of one step, over all requests.")
    max_waiting_requests: int = Field(
        1024, ge=0, le=1_048_576, description="Sequences that may wait in one worker for their first token; 0: no bound."
    )
    prefill_max_requests: int = Field(0, ge=0, le=65_536, description="Most prompts computed in one step. 0: no limit.")
    itl_target_ms: int = Field(
        0,
        ge=0,
        le=60_000,
        description="Milliseconds of a step with decodes that prefill keeps to. 0: chunks of chunkedPrefillSize, less on a slow CPU.",
    )
    attention_backend: Literal["auto", "flashinfer", "native", "cpu", "reference"] = Field(
        "auto", description="auto: the fastest that the device has."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: as the weights are stored.")
    quantization: Literal["none", "int8", "int4", "fp8"] = Field(
        "none", description="Rounds the weights of linear layers at load: int8 (CPUs), fp8 (GPUs) or int4."
    )
    policy: Literal["lpm", "fcfs"] = Field(
        "lpm", description="Who is admitted first: the longest cached prefix (lpm), or the first to come."
    )
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs that share one replica of the model; equals resources.gpus times nodes.")
    nodes: int = Field(
        1, ge=1, le=64, description="Nodes that share one replica, a pod on each; above 1 needs LeaderWorkerSet. Cannot be changed."
    )
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads of a worker. 0: its cores of affinity and CPU quota, less one from three on."
    )
    warm_tokens: int = Field(
        8192, ge=0, le=1_048_576, description="Tokens of its peers' hottest prefixes that a new worker computes first. 0: none."
    )
    warm_seconds: int = Field(10, ge=1, le=600, description="Seconds that this may delay it at most.")
    kv_cache: KvCache = Field(default_factory=lambda: KvCache(), description="Size and granularity of the KV cache.")
    speculative: Speculative | None = Field(None, description="Who guesses tokens ahead. Absent: nobody.")
    args: list[Argument] = Field(default_factory=list, max_length=64, description="Further worker flags; the last one given wins.")

    @model_validator(mode="after")
    def _chunked(self) -> Self:
        refuse(self.tensor_parallel % self.nodes > 0, f"{_EVEN}: {self.tensor_parallel} is no multiple of {self.nodes}")
        refuse(self.itl_target_ms > 0 >= self.chunked_prefill_size, f"{_TARGET} (got {self.chunked_prefill_size})")
        return self

"""Messages between the API process and the engine process, as msgspec structs over ZeroMQ.

Token ids are bytes of little-endian uint32 and block hashes bytes of little-endian uint64, so that no message has an object per token.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
PoolingKind = Literal["last", "mean", "cls"]
"""How the hidden states of a prompt are pooled: the last token's, the mean of all, or (encoders) the first token's."""
DecoderPath = Literal["native", "layers", "transformers"]
"""How a decoder is computed: a whole step in one native call, by our own layers one by one, or by transformers' code."""
Activation = Literal["sigmoid", "softmax", "none"]
"""What turns the logits of a classifier into its scores."""


class ThinkingBudget(msgspec.Struct, frozen=True):
    """The most reasoning tokens of one request, with its model's markers as tokens. `sampling/thinking.py` enforces it."""

    tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    """Forced once the budget is spent; not counted."""
    blank: tuple[int, ...] = ()
    """Tokens of whitespace that may come before `start`."""
    used: int | None = None
    """Reasoning tokens at the end of the prompt; None: the prompt does not end inside reasoning."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters of one request. `temperature=0` is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    seed: int = 0
    """Noise comes from (seed, position): equal seeds give equal tokens in any batch."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None: none; k >= 0: the chosen token's logprob and those of the k most likely tokens."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of every token in the output, once for each occurrence."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in the prompt or the output (Keskar et al. 2019)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, value added to its logit), each token once."""
    allowed_token_ids: tuple[int, ...] = ()
    """If not empty, no other token can be chosen."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output does not contain, unless no other token is possible."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for the prompt's tokens. Such a prompt uses no prefix cache, because cached positions have no logits."""
    thinking: ThinkingBudget | None = None
    """None: reasoning is not bounded."""

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether the logits are changed before temperature."""
        return self.has_penalties or bool(self.logit_bias) or bool(self.allowed_token_ids)

    @property
    def plain(self) -> bool:
        """Whether the choice is the largest unchanged logit, without logprobs."""
        if self.changes_logits or self.bad_words or self.thinking is not None:
            return False
        return self.temperature <= 0 and self.logprobs is None and not self.min_tokens


GRAMMAR_WAITED = "its grammar has waited longer for its turn than those before it may take:"
"""Start of the error of a request whose grammar was not compiled in time. The cause is the worker's load, not the request."""


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """A request for the engine. Tokens are bytes of uint32."""

    id: str
    tokens: bytes
    sampling: Sampling
    root: int
    """Root of the chain of block hashes (model, tokenizer, block size, adapter, tenant salt); different roots share no KV."""
    priority: int = 0
    tenant: str = ""
    adapter: int = 0
    """Number of a loaded adapter; 0: the model itself."""
    grammar: str = ""
    """Constraint on the output, as lowered by `grammar/constraint.py`; empty: none."""
    pooling: PoolingKind | Literal["classify"] | None = None
    """Return pooled hidden states, or the logits of a classifier, instead of output tokens; `sampling` is ignored."""
    second: int = 0
    """Where the second text of a pair begins, for models that tell the two apart (token types); 0: one text."""
    received_at: float = 0.0
    """When the API process received it, in `time.monotonic` seconds (one clock for all processes); 0: unknown. The engine reads messages
    between steps, so the request may have waited for one step already."""
    traced: bool = False
    """Report its prefill chunks: the request is part of a sampled trace."""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Drop a request and free its pages: its client disconnected or a stop string occurred. Unknown ids are ignored."""

    id: str


class GetHotPrefixes(msgspec.Struct, tag="get_hot_prefixes", frozen=True):
    """Request the hottest prefixes, of at most `tokens` tokens together, for a new worker. Answered by one `HotPrefixes`, in order."""

    tokens: int


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True):
    """Drop the cached KV that no request uses. Answered by one `PrefixCacheReset`, in order."""


class Start(msgspec.Struct, frozen=True):
    """The first message to an engine process, as JSON on its standard input: address of the channel, and configuration."""

    address: str
    config: dict[str, object]


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End the engine process after the current step."""


class FetchAdapter(msgspec.Struct, tag="fetch_adapter", frozen=True):
    """Fetch a LoRA adapter's files on the model's other nodes while steps continue. Answered by `AdapterChanged` on success or failure."""

    number: int
    """Number of the `LoadAdapter` that follows."""
    name: str
    uri: str


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Read a LoRA adapter between two steps. Answered by `AdapterChanged`."""

    number: int
    """Identifies the adapter. Never reused, so that a reloaded adapter has another number."""
    name: str
    uri: str
    path: str
    """Folder of its files, already fetched: the engine must not wait for a download."""


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """Unload an adapter that no request uses any more. Answered by `AdapterChanged`."""

    number: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position, natural logarithm, of the model's own distribution (before temperature and filters)."""

    chosen: float
    """Log-probability of the actual token."""
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0
    """Rank of the actual token, 1 for the most likely one; 0 if it was not computed (outputs)."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step's part of a prompt."""

    started: float
    """When the step began, in `time.monotonic` seconds."""
    seconds: float
    start: int
    """Tokens of the request that were computed or cached before."""
    tokens: int


class Timing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Timing of one request in the engine, in seconds of host time, with its counts of preemptions and host cache hits."""

    queue_seconds: float
    """From its arrival at the engine to its first admission."""
    prefill_seconds: float
    """From its first admission to its first token."""
    preemptions: int = 0
    host_cached_tokens: int = 0
    """Those of the output's `cached_tokens` that were loaded from the host tier."""
    chunks: tuple[Chunk, ...] = ()
    """The prefill since the latest admission, of a request with `traced`."""
    hidden_cached_tokens: int = 0
    """Those of the output's `cached_tokens` that the index did not show (`cache/grouped.py`)."""


class Output(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Output of one step for one request. The last one of a request has `finish`."""

    id: str
    tokens: bytes
    """New token ids, uint32; empty if an error or abort ends the request."""
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache when the request was first admitted."""
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The stop token id that ended it, if `finish` is "stop"."""
    error: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    timing: Timing | None = None
    """Set with the first token, and with the first token after each preemption."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Set with the first token if requested: one entry for each prompt token from the second on."""
    embedding: bytes = b""
    """The pooled hidden states, float32, of unit length, or the logits of a classifier: the only output of a request with `pooling`."""
    computed_tokens: int = 0
    """Of the last output: tokens of its prompt and output that were computed, without cached ones."""
    mask_seconds: float = 0.0
    """Of the last output: CPU time of filling the masks of its grammar."""


class Decoded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Requests that got one token and continue, in columns. Most outputs are of this kind and need no `Output` each."""

    ids: tuple[str, ...] = ()
    tokens: bytes = b""
    """One token per request; uint32."""


class CacheEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks added to or removed from the prefix cache. Stored parents come before children, removed children before parents."""

    kind: Literal["stored", "removed"]
    hashes: bytes
    parent: int = 0
    """For stored blocks, which are consecutive: the hash of the block before them, or the root's."""


class HostLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The state of the host tier, in pages."""

    total: int = 0
    used: int = 0
    saved: int = 0
    """Pages copied to the host since the start."""
    loaded: int = 0
    """Pages copied back since the start."""
    dropped: int = 0
    """Pages evicted since the start."""
    cached_tokens: int = 0
    """Prompt tokens found in the host tier, also counted in `Load.cached_tokens`."""


class Drafts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Totals of speculation since the start."""

    rounds: int = 0
    """Verified drafts: rows of a step."""
    tokens: int = 0
    """Drafted tokens."""
    accepted: int = 0
    """Accepted tokens."""
    accepted_at: tuple[int, ...] = ()
    """Number of drafts accepted up to their first token, their second, and so on."""


class Load(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The engine's state, for the router's score and for /metrics."""

    running: int = 0
    waiting: int = 0
    backlog_tokens: int = 0
    """Submitted prompt tokens that are not computed yet."""
    prefill_rate: float = 0.0
    """Prompt tokens a second, measured over recent steps with prefill; 0 before the first."""
    step_seconds: float = 0.0
    """Time of a decode step (the ITL of a request): the mean of recent ones, or the fastest while nothing runs; 0 before the first."""
    pages_total: int = 0
    pages_free: int = 0
    """Allocatable pages: free, or cached and evictable."""
    pages_cached: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    preemption_recomputed_tokens: int = 0
    """Tokens computed again because their request was preempted: neither prefix hits nor new work."""
    host: HostLoad | None = None
    """None without a host tier."""
    drafts: Drafts | None = None
    """None without speculation."""


class Step(msgspec.Struct, tag="step", frozen=True):
    """Results of one step, also the engine's heartbeat. An idle engine sends one per second, empty except for `load`."""

    outputs: tuple[Output, ...] = ()
    decoded: Decoded = Decoded()
    """Requests in it have no entry in `outputs`."""
    events: tuple[CacheEvent, ...] = ()
    load: Load | None = None
    seconds: float = 0.0
    """Wall time of the step, measured by the runner; 0 when idle."""
    prefill_tokens: int = 0
    decodes: int = 0
    stall_seconds: float = 0.0
    """Delay of decodes by prefill: the step's time minus that of recent steps without prefill, or all of it if it left the decodes out."""
    stalled: int = 0
    """Decodes that were delayed."""

    def each(self) -> Iterator[Output]:
        """Yield all outputs. Those of `decoded` have `cached_tokens` 0, as an earlier output reported it."""
        for place, name in enumerate(self.decoded.ids):
            yield Output(name, self.decoded.tokens[4 * place : 4 * place + 4], 0)
        yield from self.outputs


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """Progress of the engine's start."""

    phase: str
    """"imports", "nodes", "config", "wait", "download", "weights", "fuse", "adapters", "compile", "profile", "capture", "cache",
    "trial", "warmup", "grammars"."""
    percent: int
    detail: str = ""
    done: int = 0
    """Bytes loaded so far, of `total`; 0 if bytes are not counted."""
    total: int = 0
    beat: int = 0
    """Increases with progress on another node that the other figures do not show."""


class AdapterInfo(msgspec.Struct, frozen=True):
    """A loaded LoRA adapter."""

    number: int
    name: str
    uri: str
    digest: str
    """Identifies its content: part of the root of block hashes."""
    rank: int
    """Largest LoRA rank of its layers."""


class AdapterChanged(msgspec.Struct, tag="adapter_changed", frozen=True):
    """Result of a `FetchAdapter`, a `LoadAdapter` or an `UnloadAdapter`."""

    number: int
    info: AdapterInfo | None = None
    """Set after a successful `LoadAdapter`."""
    error: str = ""
    """Why it failed; empty on success. A failure changes nothing."""


class Pooling(msgspec.Struct, frozen=True):
    """How this model computes embeddings."""

    kind: PoolingKind | None = None
    """None: it has no embeddings."""
    refused: str = ""
    """Why it has no embeddings, and what to do."""
    size: int = 0
    """Values of an embedding."""
    any_dimensions: bool = False
    """Embeddings may be truncated to any length (Matryoshka, Kusupati et al. 2022)."""
    dimensions: tuple[int, ...] = ()
    """Embeddings may be truncated to these lengths only."""


class Classifier(msgspec.Struct, frozen=True):
    """The head of a classifier. One with a single label is a reranker (cross-encoder)."""

    labels: tuple[str, ...]
    activation: Activation


class StepModes(msgspec.Struct, frozen=True):
    """How the engine runs its steps."""

    cuda_graphs: str = "off"
    """"on", or "off: " and the reason."""
    overlap: str = "off"
    """"on", or "off: " and the reason."""
    fallback: str = ""
    """Why CUDA graphs are off although they were wanted and are possible here: they could not be recorded, or failed the start-up trial.
    Such a worker serves more slowly. Empty: there is no fallback."""
    piecewise_graphs: str = "off"
    """For steps with prompts: "on: up to N tokens", or "off: " and the reason."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine serves."""

    max_model_len: int
    page_size: int
    pages: int
    model_digest: str
    """Identifies the weights and config: part of the root of block hashes."""
    vocabulary_size: int
    """Rows of the model's embedding. A tokenizer may have tokens without a row."""
    eos_token_ids: tuple[int, ...] = ()
    backend: str = ""
    """Class name of the attention backend."""
    cpu_level: str = ""
    """One of `isa.LEVELS`; empty on another device."""
    decoder: DecoderPath | Literal[""] = ""
    """Empty for an encoder."""
    kv_groups: str = ""
    """How many groups of layers have KV pages of their own, and what for; of one group, why."""
    chunked_prefill_size: int = 0
    """Tokens of a chunk, by the flag, the device and its memory; below 1: prompts are not cut."""
    modes: StepModes = StepModes()
    prompt_format: bytes = b""
    """A `PromptFormat` as JSON. The engine process builds it with transformers, which the API process does not import."""
    sampling_defaults: dict[str, float] = {}
    """temperature, top_p, top_k, min_p, repetition_penalty that the model's authors recommend, if the configuration uses them."""
    adapters: tuple[AdapterInfo, ...] = ()
    """Adapters of `--lora-modules`."""
    pooling: Pooling = Pooling()
    generates: bool = True
    """False: the model has no language model head and serves embeddings, scores or classes only."""
    is_encoder: bool = False
    """Whether each token attends to all others: no KV, and the tokenizer's special tokens belong to each text."""
    classifier: Classifier | None = None
    """The head of a classifier; it makes no embeddings."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine cannot continue. This is its last message."""

    reason: str


class HotPrefix(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A cached prefix: token ids (uint32) of whole pages, under a root number."""

    root: int
    tokens: bytes


class HotPrefixes(msgspec.Struct, tag="hot_prefixes", frozen=True):
    """The reply to `GetHotPrefixes`, the hottest first."""

    prefixes: tuple[HotPrefix, ...]


class PrefixCacheReset(msgspec.Struct, tag="prefix_cache_reset", frozen=True):
    """The reply to `ResetPrefixCache`."""

    pages: int
    """Pages dropped, in both tiers."""


ToEngine = Submit | Abort | GetHotPrefixes | ResetPrefixCache | Stop | FetchAdapter | LoadAdapter | UnloadAdapter
FromEngine = Step | Loading | Ready | HotPrefixes | PrefixCacheReset | Failed | AdapterChanged

"""Messages between the API process and the engine process, as msgspec structs over ZeroMQ.

Token ids travel as bytes of little-endian uint32, block hashes as bytes of little-endian uint64: no per-token objects on the wire.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
PoolingKind = Literal["last", "mean"]
"""How the hidden states of a prompt become one vector: that of its last token, or the mean of all."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request's tokens are chosen. `temperature=0` is greedy."""

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
    """None: none; k >= 0: the chosen token's logprob and the k most likely ones."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that is in the output; `frequency_penalty` as often as it is there."""
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in the prompt or the output (Keskar et al. 2019)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit), each token once."""
    allowed_token_ids: tuple[int, ...] = ()
    """Where not empty: no other token can be chosen."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that do not come in the output, unless nothing else could."""
    prompt_logprobs: int | None = None
    """As `logprobs`, of the prompt's own tokens, each after those before it. Such a prompt takes nothing from the prefix cache:
    cached positions have no logits."""

    @property
    def penalized(self) -> bool:
        """The choice depends on the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def adjusted(self) -> bool:
        """The logits are changed before temperature."""
        return self.penalized or bool(self.logit_bias) or bool(self.allowed_token_ids)

    @property
    def plain(self) -> bool:
        """The largest logit, and nothing to change or to tell."""
        return self.temperature <= 0 and self.logprobs is None and not self.min_tokens and not self.adjusted and not self.bad_words


GRAMMAR_WAITED = "its grammar has waited longer for its turn than those before it may take:"
"""Begins the error of a request that the worker had no time for: no fault of the request."""


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
    """What its output must be, as `grammar/constraint.py` has lowered it; empty: anything."""
    pooling: PoolingKind | None = None
    """Its hidden states are wanted, pooled so, and no output; of `sampling` nothing counts."""
    received_at: float = 0.0
    """When the API process received it, by `time.monotonic` (one clock for all processes); 0: unknown. The engine reads messages between
    steps, so the request may already have waited for one."""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """The client has gone or a stop string was met: drop the request and give its pages back. Unknown ids are ignored."""

    id: str


class GetHotPrefixes(msgspec.Struct, tag="ask-hot", frozen=True):
    """Request the hottest prefixes, of at most `tokens` tokens together, for a new worker. One `Hot` answers, in order."""

    tokens: int


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End the engine process once the current step is done."""


class FetchAdapter(msgspec.Struct, tag="fetch_adapter", frozen=True):
    """Have a LoRA adapter's files fetched on the other nodes of the model, beside the steps. Answered by `AdapterChanged`, once they are
    there or cannot be had."""

    number: int
    """Of the `LoadAdapter` that follows."""
    name: str
    uri: str


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Read a LoRA adapter between two steps. Answered by `AdapterChanged`."""

    number: int
    """Stands for it from now on; never used twice, so that a reloaded adapter is another one."""
    name: str
    uri: str
    path: str
    """Folder of its files: fetched already, for the engine must not wait for a download."""


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """Forget an adapter that no request uses any more. Answered by `AdapterChanged`."""

    number: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position, natural logarithm, of the model's own distribution (before temperature and filters)."""

    chosen: float
    """Of the token that is there."""
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0
    """Of that token among all, 1 for the most likely one; 0 where it was not determined (outputs)."""


class Timing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Host times of one request in the engine, seconds, and what goes with them."""

    queue_seconds: float
    """From its arrival at the engine to the step that admitted it (the first time)."""
    prefill_seconds: float
    """From there to its first token."""
    preemptions: int = 0
    host_cached_tokens: int = 0
    """Of the output's `cached_tokens`, those that came back from the host tier."""


class Output(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step added to one request. The last one of a request carries `finish`."""

    id: str
    tokens: bytes
    """New token ids, uint32; empty where an error or abort ends the request."""
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache when the request was first admitted."""
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The stop token id that ended it, where `finish` is "stop"."""
    error: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    timing: Timing | None = None
    """With the first token, and with the first token after each preemption."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first token: of the prompt's second token and all after it, where they were asked for."""
    embedding: bytes = b""
    """The pooled hidden states, float32, of unit length: the one output of a request with `pooling`."""


class Decoded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Requests that got one token and go on, with nothing else to tell: most of what steps bring, without an `Output` for each."""

    ids: tuple[str, ...] = ()
    tokens: bytes = b""
    """Of these requests, one each; uint32."""


class CacheEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks that the prefix cache began or ceased to hold. Stored parents come before children, removed children before parents."""

    kind: Literal["stored", "removed"]
    hashes: bytes
    parent: int = 0
    """Of stored blocks, which follow each other: the hash of the block before them, or the root's."""


class HostLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The state of the host tier, in pages."""

    total: int = 0
    used: int = 0
    saved: int = 0
    """Copied to the host since the start."""
    loaded: int = 0
    """Copied back since the start."""
    dropped: int = 0
    """Given up since the start."""
    cached_tokens: int = 0
    """Prompt tokens found in it; `Load.cached_tokens` counts them too."""


class Drafts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Totals of speculation since the start."""

    rounds: int = 0
    """Drafts verified: rows of a step."""
    tokens: int = 0
    """Tokens in them."""
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    """How many drafts were accepted up to their first token, their second, and so on."""


class Load(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The engine's state, for the router's score and for /metrics."""

    running: int = 0
    waiting: int = 0
    backlog_tokens: int = 0
    """Prompt tokens submitted and not computed yet."""
    prefill_rate: float = 0.0
    """Prompt tokens a second, measured over recent steps with prefill; 0 before the first."""
    step_seconds: float = 0.0
    """Recent decode step time (the ITL of a running request)."""
    pages_total: int = 0
    pages_free: int = 0
    """Pages that could be had now: free, or cached and evictable."""
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
    """None where nothing speculates."""


class Step(msgspec.Struct, tag="step", frozen=True):
    """What one step (or a second of idling: then everything but `load` is empty) brought. Also the engine's heartbeat."""

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
    """How much longer the step was for its decodes than recent ones without prefill: each of them waited so long for others. All of it,
    where it left them out."""
    stalled: int = 0
    """Decodes that waited so."""

    def each(self) -> Iterator[Output]:
        """All outputs. `cached_tokens` is 0 in those of `decoded`: it has been told."""
        for place, name in enumerate(self.decoded.ids):
            yield Output(name, self.decoded.tokens[4 * place : 4 * place + 4], 0)
        yield from self.outputs


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """Progress of the engine's start."""

    phase: str
    """"imports", "nodes", "config", "wait", "download", "weights", "fuse", "adapters", "compile", "profile", "capture", "cache",
    "rehearsal", "grammars"."""
    percent: int
    detail: str = ""
    done: int = 0
    """Bytes of `total`; 0 where they are not counted."""
    total: int = 0
    beat: int = 0
    """Moves on while something gets on that the other figures do not show, on another node."""


class AdapterInfo(msgspec.Struct, frozen=True):
    """A loaded LoRA adapter."""

    number: int
    name: str
    uri: str
    digest: str
    """Names its content: part of the root of block hashes."""
    rank: int
    """The largest of its layers."""


class AdapterChanged(msgspec.Struct, tag="adapter_changed", frozen=True):
    """What came of a `FetchAdapter`, a `LoadAdapter` or an `UnloadAdapter`."""

    number: int
    info: AdapterInfo | None = None
    """Of an adapter that was loaded."""
    error: str = ""
    """Why nothing was changed."""


class Pooling(msgspec.Struct, frozen=True):
    """How this model makes embeddings."""

    kind: PoolingKind | None = None
    """None: it makes none."""
    refused: str = ""
    """Why not, and what to do."""
    size: int = 0
    """Values of an embedding."""
    any_dimensions: bool = False
    """It was trained so that the first values of an embedding are one too (Matryoshka, Kusupati et al. 2022)."""
    dimensions: tuple[int, ...] = ()
    """The same, of these lengths only."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine serves."""

    max_model_len: int
    page_size: int
    pages: int
    model_digest: str
    """Names the weights and config: part of the root of block hashes."""
    vocabulary_size: int
    """Rows of the model's embedding: a tokenizer may know tokens that the model has no row for."""
    eos_token_ids: tuple[int, ...] = ()
    backend: str = ""
    """Class of the attention's backend."""
    cpu_level: str = ""
    """One of `isa.LEVELS`; empty on another device."""
    native_decoder: bool = False
    """A step of the whole model is one native call."""
    prompt_format: bytes = b""
    """A `PromptFormat` as JSON. The engine process makes it with transformers, which API processes lack."""
    sampling_defaults: dict[str, float] = {}
    """temperature, top_p, top_k, min_p, repetition_penalty where the model's authors recommend one and the configuration lets them."""
    adapters: tuple[AdapterInfo, ...] = ()
    """Those of `--lora`."""
    pooling: Pooling = Pooling()
    generates: bool = True
    """False: the model has no head, so embeddings are all that it gives."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine cannot continue. This is its last message."""

    reason: str


class HotPrefix(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A cached prefix: whole pages of token ids (uint32) under a root number."""

    root: int
    tokens: bytes


class Hot(msgspec.Struct, tag="hot", frozen=True):
    """The answer to `GetHotPrefixes`, the hottest first."""

    prefixes: tuple[HotPrefix, ...]


ToEngine = Submit | Abort | GetHotPrefixes | Stop | FetchAdapter | LoadAdapter | UnloadAdapter
FromEngine = Step | Loading | Ready | Hot | Failed | AdapterChanged

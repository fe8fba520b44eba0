"""Answers about tokens, and about the worker itself."""

from typing import Any

from msgspec import UNSET, UnsetType

from fairlead_common.protocols.answer import Answer


class Tokens(Answer):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    """Context length in tokens."""
    tokens: list[int]
    token_strs: list[str | None] | None
    """With `return_token_strs`: each token as the vocabulary writes it."""


class Prompt(Answer):
    """The text of tokens."""

    prompt: str


class Health(Answer):
    """Whether the engine is alive, or whether the worker accepts requests."""

    status: str
    """`ok`, or with status 503 `failed`, `draining` or the engine's phase."""
    engine: str | UnsetType = UNSET
    """The engine's phase."""
    reason: str | UnsetType = UNSET
    """Why the answer is no."""


class Readiness(Answer, kw_only=True):
    """Whether the worker serves requests, and how far its start is."""

    ready: bool
    phase: str
    percent: int
    """Of the bytes of the model."""
    reason: str | None
    stage: str | UnsetType = UNSET
    """While the model loads."""
    bytes: int | UnsetType = UNSET
    total_bytes: int | UnsetType = UNSET
    fallback: str | UnsetType = UNSET
    """Why the engine runs without CUDA graphs or overlap although they were wanted."""
    start_up_seconds: dict[str, float]
    """Seconds of each stage so far."""


class Version(Answer):
    """The release of this program."""

    version: str


class Load(Answer, kw_only=True):
    """The worker's load, for routers and dashboards."""

    pod: str
    address: str
    draining: bool
    ready: bool
    max_running: int
    """`--max-num-seqs`."""
    scheduling_policy: str
    """`--scheduling-policy`."""
    server_load: int
    """Inference requests in progress."""
    incarnation: str | UnsetType = UNSET
    """The name under which the index knows this start of the worker."""
    canary: str | UnsetType = UNSET
    fallback: str | UnsetType = UNSET
    """Why the engine runs without CUDA graphs or overlap although they were wanted."""
    adapters: dict[str, dict[str, Any]] | UnsetType = UNSET
    """By name: digest, root and parent of each LoRA adapter."""
    running: int
    waiting: int
    backlog_tokens: int
    """Prompt tokens still to compute."""
    prefill_rate: float
    """Prompt tokens in a second."""
    step_seconds: float
    pages_free: int
    pages_total: int
    page_size: int
    """Tokens in a page."""
    arrival_rate: float
    """Requests in a second, of about the last ten seconds."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class ServerInfo(Answer, kw_only=True):
    """The release and the settings. The fields about the model are absent until it is loaded."""

    version: str
    settings: dict[str, str]
    """By name, without passwords."""
    system_fingerprint: str | UnsetType | None = UNSET
    max_model_len: int | UnsetType = UNSET
    attention_backend: str | UnsetType = UNSET
    cpu_level: str | UnsetType = UNSET
    decoder: str | UnsetType = UNSET
    """`native`: one call for a whole step; `layers`: our own, one by one; `transformers`: the generic path; empty for an encoder."""
    kv_groups: str | UnsetType = UNSET
    """How many groups of layers have KV pages of their own, and what for; of one group, why."""
    chunked_prefill_size: int | UnsetType = UNSET
    """Tokens of a step that has both decodes and prefill, at most: by the flag, else measured; below 1: prompts are not cut."""
    cuda_graphs: str | UnsetType = UNSET
    """`on`, or `off: ` and the reason."""
    overlap: str | UnsetType = UNSET
    """`on`, or `off: ` and the reason."""
    fallback: str | UnsetType = UNSET
    """Why one of them is off although it was wanted; empty: no fallback."""
    piecewise_graphs: str | UnsetType = UNSET
    """For steps with prompts: `on: up to N tokens`, or `off: ` and the reason."""


class TokenizerInfo(Answer, kw_only=True):
    """The tokenizer's settings. The special tokens are further fields, such as `eos_token`."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    tokenizer_digest: str
    vocab_size: int
    model_max_length: int
    """Context length in tokens."""
    chat_template: str
    tool_chat_template: str
    """For requests with tools. Empty: `chat_template`."""


class DroppedPages(Answer):
    """The cached KV is gone."""

    dropped_pages: int

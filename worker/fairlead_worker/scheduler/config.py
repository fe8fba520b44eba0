"""The configuration of the scheduler: fixed at start."""

from dataclasses import dataclass
from typing import Literal

from fairlead_common.scheduling_policy import PolicyName

LEAST_CHUNK = 512
"""Prefill tokens of a step where nothing is measured. A measured chunk is a multiple of it."""
SpeculativeMethod = Literal["none", "ngram", "draft"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and constants of one engine. Fields of the first block are set by flags or the model, those of the second are constants.

    `WorkerConfig` checks the flags.
    """

    max_model_len: int
    """Maximum tokens of a sequence: prompt and output."""
    max_num_seqs: int = 256
    """Maximum number of running requests."""
    chunked_prefill_size: int = LEAST_CHUNK
    """Token budget of a step with prefill and decodes, decodes included. 0 or less: prompts are not cut into chunks."""
    idle_prefill_chunks: int = 1
    """Maximum chunks of a step without decodes. The step takes only as many as it expects to compute in one second."""
    max_prefill_tokens: int = 8192
    """Maximum prompt tokens of a step. Without chunking, a longer prompt gets a step of its own."""
    enable_mixed_chunk: bool = True
    """A step may contain both prefill and decodes. False: a step contains only one of them, and prefill goes first."""
    prefill_max_requests: int = 0
    """Maximum prompts of a step (SGLang's name). 0: limited by tokens only."""
    itl_target_ms: float = 0.0
    """Target duration of a step with decodes, in milliseconds: chunks are sized to keep it (`scheduler/chunk_sizer.py`). 0: fixed size."""
    chunks_grow: bool = True
    """With an ITL target, a chunk may grow up to four times `chunked_prefill_size`. False: chunks only shrink, with the decode step."""
    policy: PolicyName = "lpm"
    """Order of waiting requests of equal priority."""
    dedupe_tokens: int = 32
    """Minimum length of a common prefix that requests share in the step that computes it. 0: they share it only from the next step on."""
    eos_token_ids: tuple[int, ...] = ()
    prompt_logprobs: bool = True
    """The runner can return logprobs and hidden states of prompt tokens."""
    generates: bool = True
    """The model has a language-model head."""
    keeps_kv: bool = True
    """False: an encoder. Its texts are computed whole, each in one step, and nothing of them is cached."""
    speculative_method: SpeculativeMethod = "none"
    """Source of draft tokens: n-gram lookup in the request's own text, or the runner's draft model."""
    speculative_num_tokens: int = 5
    """Maximum draft tokens per request and step. Fewer are used when few are accepted (`scheduler/speculation.py`)."""
    speculative_ngram_min: int = 2
    """Tokens that must match for n-gram lookup."""
    speculative_ngram_max: int = 5
    """Tokens that n-gram lookup compares to choose between several matches."""

    max_bypass: int = 64
    """Maximum number of later requests admitted before the oldest waiting one; of more urgent ones their tokens count (`WaitingQueue`).
    After that, the oldest is next under every policy."""
    max_preemptions: int = 3
    """Maximum preemptions of one request by more urgent ones, of those that cost computed tokens. After that, it runs to its end."""
    admission_scan_limit: int = 16
    """Maximum requests that a step examines without admitting them. It bounds the CPU time of a step."""
    match_refresh_limit: int = 64
    """Maximum waiting requests whose prefix match a step updates. It bounds the CPU time of a step."""
    promise_limit: int = 8
    """Maximum waiting requests whose blocks a step shows to the index. It bounds the CPU time of a step."""
    promise_tokens: int = 16384
    """Tokens after which a step shows no further request: twice what it computes at most. Hashing takes 0.2 ms; 0.7 ms in blocks of 16."""
    clip_max_new_tokens: int = 4096
    """Maximum output tokens reserved for one request, whatever its max_tokens (SGLang's CLIP_MAX_NEW_TOKENS). Few outputs are longer."""
    initial_new_token_ratio: float = 0.7
    min_new_token_ratio: float = 0.1
    new_token_ratio_decay_steps: int = 600
    """Steps without preemption in which the ratio falls from its initial to its minimum value. These three are SGLang's defaults."""
    speculative_break_even: int = 64
    """Tokens per step at which computing takes as long as reading the weights. Draft tokens are nearly free below it.

    Measured on two CPU cores with a 90M model: the linear layers took 9.1 ms for 8 rows and 36 ms for 256, hence 75 tokens.
    Accelerators have a higher value, so 64 is conservative.
    """

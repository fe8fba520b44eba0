"""What the scheduler is told once, at start."""

from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["fcfs", "lpm", "priority", "fair"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
SpeculativeMethod = Literal["none", "ngram", "draft"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and constants of one engine. The first block are flags; the second are constants, here to be named, explained and tested."""

    max_model_len: int
    """Tokens of the longest sequence, prompt and output."""
    max_num_seqs: int = 256
    """Requests that run at once."""
    chunked_prefill_size: int = 512
    """Tokens of a step with prefill beside decodes, these included; 0 or less: prompts are computed whole."""
    idle_prefill_chunks: int = 1
    """Chunks that a step may prefill while nothing decodes that a longer step would keep waiting, where a second is enough for them."""
    max_prefill_tokens: int = 8192
    """Prompt tokens of one step at most; a longer prompt, when chunking is off, has a step to itself."""
    enable_mixed_chunk: bool = True
    """Decodes and prefill share a step; off: a step is one or the other, prefill first (for comparison)."""
    prefill_max_requests: int = 0
    """Prompts of one step at most (SGLang's name); 1: one at a time, for comparison; 0: as many as the tokens allow."""
    itl_target_ms: float = 0.0
    """Most milliseconds of a step with decodes: prefill gives way (`scheduler/chunk_sizer.py`); 0: the fixed size."""
    chunks_grow: bool = True
    """With an ITL target, a chunk may be longer than `chunked_prefill_size`, up to four times. False: the target only makes it shorter."""
    policy: PolicyName = "lpm"
    dedupe_tokens: int = 32
    """A prefix of at least so many tokens is shared within the step that computes it; 0: from the next step on."""
    eos_token_ids: tuple[int, ...] = ()
    prompt_logprobs: bool = True
    """The runner can look into prompts: score them, pool their hidden states."""
    generates: bool = True
    """The model has a head."""
    speculative_method: SpeculativeMethod = "none"
    """Source of draft tokens: none, n-gram lookup in the request's own text, or the runner's draft model."""
    speculative_num_tokens: int = 5
    """Tokens guessed at once at most; fewer where they are accepted less (`scheduler/speculation.py`)."""
    speculative_ngram_min: int = 2
    speculative_ngram_max: int = 5
    """Tokens that must have been there before, and how many are compared to choose among places."""

    max_bypass: int = 64
    """Later requests that may be admitted before the oldest one; then it goes next, whatever its prefix."""
    max_preemptions: int = 3
    """Times that one request gives way to others of more priority; then it runs to its end."""
    admission_scan_limit: int = 16
    """Requests that one step may look at and leave waiting: bounds a step's cost."""
    match_refresh_limit: int = 64
    """Waiting requests whose match is brought up to date in one step: bounds a step's cost."""
    clip_max_new_tokens: int = 4096
    """Output tokens counted for a request at most: few answers are longer, whatever max_tokens says (SGLang's CLIP_MAX_NEW_TOKENS)."""
    initial_new_token_ratio: float = 0.7
    min_new_token_ratio: float = 0.1
    new_token_ratio_decay_steps: int = 600
    """Steps without retraction from the initial ratio to the least. These three are SGLang's defaults."""
    speculative_break_even: int = 64
    """Tokens for which a step takes twice the time of an empty one: reading the weights takes as long as computing with them. Between
    8 and 256 rows the linears of a 90M model took 9.1 and 36 ms on two cores: 75 tokens; accelerators have more, so 64 is careful."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_prefill_tokens", "idle_prefill_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name in ("prefill_max_requests", "dedupe_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name.replace('_', '-')} must be 0 (off) or more, not {getattr(self, name)}")
        if not 0 <= self.itl_target_ms < float("inf"):
            raise ValueError(f"itl-target-ms must be 0 (off) or more, not {self.itl_target_ms}")
        if self.itl_target_ms and self.chunked_prefill_size <= 0:
            raise ValueError("itl-target-ms cuts prompts into chunks, so it needs a chunked-prefill-size above 0")
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if not 1 <= self.speculative_num_tokens <= 64:  # each step's report counts by position
            raise ValueError(f"speculative-num-tokens must be 1 to 64, not {self.speculative_num_tokens}")
        if not 1 <= self.speculative_ngram_min <= self.speculative_ngram_max:
            raise ValueError(
                "speculative-ngram-min must be at least 1 and at most speculative-ngram-max, "
                f"not {self.speculative_ngram_min} and {self.speculative_ngram_max}"
            )

"""How large a step can get under a configuration, and a configuration whose steps are no larger than memory allows."""

from dataclasses import dataclass, replace

from fairlead_worker.scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of every step that the scheduler plans; `tests/worker/scheduler/test_limits.py` drives it against them."""

    prefill: int
    """Tokens of prompts."""
    decode: int
    """Tokens of decodes, the guessed ones included."""
    context: int
    """Tokens of the longest sequence."""

    @property
    def tokens(self) -> int:
        return self.prefill + self.decode

    @classmethod
    def of(cls, config: SchedulerConfig, page_size: int) -> "StepLimits":
        """Of `config`, as `StepBudget` reads it."""
        prefill = config.max_prefill_tokens
        if config.itl_target_ms and config.chunks_grow:
            pass  # the chunk follows the time that it takes, up to max_prefill_tokens
        elif config.chunked_prefill_size > 0:
            prefill = min(prefill, config.chunked_prefill_size * config.idle_prefill_chunks)
        else:
            prefill = max(prefill, config.max_model_len)  # a longer prompt has a step to itself
        return cls(max(prefill, page_size), config.max_num_seqs * _rows_per_decode(config), config.max_model_len)


def within(config: SchedulerConfig, tokens: int, page_size: int) -> SchedulerConfig:
    """`config`, or as much of it as keeps every step to `tokens` tokens: fewer chunks in idle steps; where one is too much already, half of
    the tokens for decodes at most and the rest for prompts."""
    while (large := StepLimits.of(config, page_size).tokens > tokens) and config.idle_prefill_chunks > 1:
        config = replace(config, idle_prefill_chunks=config.idle_prefill_chunks - 1)
    if not large:
        return config
    seqs = min(config.max_num_seqs, max(1, tokens // 2 // _rows_per_decode(config)))
    prefill = max(page_size, tokens - seqs * _rows_per_decode(config))
    chunk = config.chunked_prefill_size
    return replace(
        config,
        max_num_seqs=seqs,
        max_prefill_tokens=min(config.max_prefill_tokens, prefill),
        chunked_prefill_size=min(chunk, prefill) if chunk > 0 else prefill,
    )


def _rows_per_decode(config: SchedulerConfig) -> int:
    return 1 if config.speculative_method == "none" else 1 + config.speculative_num_tokens

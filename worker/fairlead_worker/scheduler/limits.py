"""The largest step of a configuration, and a configuration whose largest step fits into memory."""

from dataclasses import dataclass, replace

from fairlead_worker.scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of every step that the scheduler plans (property-tested in `tests/worker/scheduler/test_limits.py`)."""

    prefill: int
    """Tokens of prompts."""
    decode: int
    """Tokens of decodes, draft tokens included."""
    context: int
    """Tokens of the longest sequence."""

    @property
    def tokens(self) -> int:
        return self.prefill + self.decode

    @classmethod
    def from_config(cls, config: SchedulerConfig, page_size: int) -> "StepLimits":
        """Return the limits of `config`. `StepBudget` keeps them."""
        prefill = config.max_prefill_tokens
        if config.itl_target_ms and config.chunks_grow:
            pass  # a chunk may grow up to max_prefill_tokens
        elif config.chunked_prefill_size > 0:
            prefill = min(prefill, config.chunked_prefill_size * config.idle_prefill_chunks)
        if config.chunked_prefill_size <= 0 or not config.keeps_kv:
            prefill = max(prefill, config.max_model_len)  # a longer prompt gets a step of its own
        return cls(max(prefill, page_size), config.max_num_seqs * _rows_per_decode(config), config.max_model_len)


def limit_steps(config: SchedulerConfig, tokens: int, page_size: int) -> SchedulerConfig:
    """Return `config`, changed only as far as no step has more than `tokens` tokens.

    Idle steps get fewer chunks first. If a single chunk is still too large, decodes get at most half of the tokens, and prompts the rest.
    """
    while (is_large := StepLimits.from_config(config, page_size).tokens > tokens) and config.idle_prefill_chunks > 1:
        config = replace(config, idle_prefill_chunks=config.idle_prefill_chunks - 1)
    if not is_large:
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

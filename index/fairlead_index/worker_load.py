"""What a worker reports to the index: its identity (`WorkerCard`) and its load (`WorkerLoad`)."""

from typing import Final

import msgspec

PRIOR_RATE: Final = 4000.0
"""Prefill rate assumed for a worker that has not measured its own, tokens per second."""


class WorkerCard(msgspec.Struct, frozen=True):
    """One worker in the index. `pod` is unique among living workers; `address` is `host:port` as the router dials it."""

    pod: str
    address: str
    block_tokens: int
    revision: str = ""


class WorkerLoad(msgspec.Struct, frozen=True):
    """One sample of a worker's queue. Zero means unknown for `prefill_rate`, `step_seconds`, `pages_total` and `page_size`."""

    running: int = 0
    """Requests that decode or prefill in the current step."""
    waiting: int = 0
    """Requests received and not started."""
    backlog_tokens: int = 0
    """Prompt tokens still to compute for waiting and partly prefilled requests, without cached tokens."""
    prefill_rate: float = 0.0
    """Prompt tokens a second, measured while prefilling."""
    step_seconds: float = 0.0
    """Duration of a step now, in seconds: the least that a new request waits, and what it costs the running ones."""
    pages_free: int = 0
    """Pages that a new request can get: free pages, and cached pages that may be evicted."""
    pages_total: int = 0
    page_size: int = 0
    """Tokens per page."""
    arrival_rate: float = 0.0
    """Requests received per second, of about the last ten seconds."""

    @property
    def rate(self) -> float:
        """Return the prompt tokens a second, as measured or as assumed."""
        return self.prefill_rate if self.prefill_rate > 0 else PRIOR_RATE

    def backlog_after(self, seconds: float) -> float:
        """Return the tokens of the backlog that are left, so many seconds after the load was measured: all if the rate is unknown."""
        return max(0.0, self.backlog_tokens - self.prefill_rate * max(0.0, seconds))

    def has_room(self, tokens: int) -> bool:
        """Return whether a new request gets pages for so many tokens; True where the pages are unknown."""
        return not self.pages_total or not self.page_size or self.pages_free * self.page_size >= tokens

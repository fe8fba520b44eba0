"""What a worker says about itself: who it is (`WorkerCard`) and how busy it is (`WorkerLoad`)."""

import msgspec


class WorkerCard(msgspec.Struct, frozen=True):
    """One worker in the index. `pod` is unique among living workers; `address` is `host:port` as the router dials it."""

    pod: str
    address: str
    block_tokens: int
    revision: str = ""


class WorkerLoad(msgspec.Struct, frozen=True):
    """One look at a worker's queue. Zero means unknown for `prefill_rate`, `step_seconds`, `pages_total` and `page_size`."""

    running: int = 0
    """Requests that decode or prefill in the current step."""
    waiting: int = 0
    """Requests received and not started."""
    backlog_tokens: int = 0
    """Prompt tokens still to be computed, of waiting and partly prefilled requests, cached ones not counted."""
    prefill_rate: float = 0.0
    """Prompt tokens a second, measured while prefilling."""
    step_seconds: float = 0.0
    """Seconds of one step now: what a request waits at least, and what it costs the running ones."""
    pages_free: int = 0
    """Pages a new request could get: free ones and cached ones that may be evicted."""
    pages_total: int = 0
    page_size: int = 0
    """Tokens a page."""

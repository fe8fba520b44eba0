"""Best-effort requests: which workers have capacity that the other classes do not need, and the share that is theirs in any case. Pure.

Capacity is unneeded at a worker that computes no prompt. It gets one best-effort prompt at a time: the least that keeps it busy, since the
next one follows as soon as the answer begins, and the most that a request of another class then has to wait for.
"""

from fairlead_router.fleet.workers import Worker

FREE_SHARE = 0.25
"""Share of a worker's seats and KV pages that best-effort requests leave free, as room for others while some of them end."""
STARVATION_SHARE = 1 / 32
"""Share of the prompt tokens that are sent as best effort under any load. It costs the other classes 3 % of their goodput."""


class BestEffortShare:
    """Credit of waiting best-effort requests, in prompt tokens.

    The first of them goes, like a request of another class, once the others got 32 times its tokens: they delay it by no more than that.
    """

    def __init__(self) -> None:
        self._credit = 0.0

    def earn(self, tokens: int) -> None:
        """Record that a request of another class got `tokens` while best-effort requests wait."""
        self._credit += tokens * STARVATION_SHARE

    def spend(self, tokens: int) -> bool:
        """Return whether the credit covers the first waiting request, and take its tokens. Left-over credit is not saved up."""
        if self._credit < max(1, tokens):
            return False
        self._credit = 0.0
        return True


def has_spare_capacity(worker: Worker, least_itl: float, now: float) -> bool:
    """Return whether the worker should get a best-effort request. `least_itl`: tightest ITL bound of all classes, in seconds."""
    load = worker.load
    if worker.tokens_ahead(now) > 0 or load.step_seconds > least_itl:
        return False
    has_seats = not worker.max_running or max(load.running, worker.in_flight) < (1 - FREE_SHARE) * worker.max_running
    return has_seats and (not load.pages_total or load.pages_free >= FREE_SHARE * load.pages_total)

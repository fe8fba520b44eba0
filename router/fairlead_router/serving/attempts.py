"""Attempts of one request, and the workers that it may be sent to again."""

from fairlead_router.fleet.workers import Worker


class Attempts:
    """Attempts of one request. A worker's key is (address, generation): a restarted worker counts as another one.

    | an attempt ends with | the same worker |
    | --- | --- |
    | no connection: the worker never saw the request | may be retried after a health check finds it ready |
    | a lost connection before the answer's head | is retried once, on a new connection, if no other worker is left |
    | a second loss | has failed this request, if its next health check finds it ready; else it was terminating |
    """

    __slots__ = ("_ended", "excluded", "failed", "lost")

    def __init__(self) -> None:
        self.excluded: set[tuple[str, int]] = set()
        """Workers that must not be chosen now."""
        self.failed: frozenset[tuple[str, int]] = frozenset()
        """Workers that lost the request twice. While one of them is ready, the request does not wait."""
        self.lost = 0.0
        """Connections lost during this request. A worker that was already terminating counts for 0.5."""
        self._ended: dict[tuple[str, int], str] = {}
        """How the last attempt at a worker ended: `refused` or `lost`."""

    def begin(self, worker: Worker) -> bool:
        """Record an attempt. Return whether it needs a new connection, because the last one to this worker was lost."""
        key = (worker.address, worker.generation)
        self.excluded.add(key)
        return self._ended.get(key) == "lost"

    def record_refused(self, worker: Worker) -> None:
        """Record that no connection could be made."""
        self._ended.setdefault((worker.address, worker.generation), "refused")

    def record_lost(self, worker: Worker, weight: float, final: bool) -> None:
        """Record a connection lost before the answer's head. `final`: the worker has lost this request before."""
        self.lost += weight
        key = (worker.address, worker.generation)
        self._ended[key] = "lost"
        if final:
            self.failed |= {key}

    def allow_retries(self) -> None:
        """Make retryable workers eligible again: no other worker is left."""
        self.excluded.difference_update(self._ended.keys() - self.failed)

"""Where one request has been sent, and where it may be sent again."""

from fairlead_router.fleet.workers import Worker


class Attempts:
    """The attempts of one request. A worker is known by (address, life): one that has restarted is another one.

    | an attempt ends with | the same worker |
    | --- | --- |
    | no connection: the worker never saw the request | is asked again when a look finds it ready |
    | a lost connection before the answer's head | is asked once more, on a new connection, if no other worker is left |
    | a second loss | has failed this request, if it is ready at its next look; else it was ending |
    """

    __slots__ = ("_ended", "excluded", "failed", "lost")

    def __init__(self) -> None:
        self.excluded: set[tuple[str, int]] = set()
        """Not to be chosen now."""
        self.failed: frozenset[tuple[str, int]] = frozenset()
        """Lost the request twice. While one of them is ready, waiting is of no use."""
        self.lost = 0.0
        """Connections lost under this request; a worker that was ending anyway counts for half."""
        self._ended: dict[tuple[str, int], str] = {}
        """How the last attempt at a worker ended: `refused` or `lost`."""

    def begin(self, worker: Worker) -> bool:
        """Count an attempt. True where it needs a new connection, as the last one to this worker was lost."""
        key = (worker.address, worker.generation)
        self.excluded.add(key)
        return self._ended.get(key) == "lost"

    def record_refused(self, worker: Worker) -> None:
        """There was no connection."""
        self._ended.setdefault((worker.address, worker.generation), "refused")

    def record_lost(self, worker: Worker, weight: float, final: bool) -> None:
        """The connection was lost before the answer's head. `final`: not for the first time."""
        self.lost += weight
        key = (worker.address, worker.generation)
        self._ended[key] = "lost"
        if final:
            self.failed |= {key}

    def allow_retries(self) -> None:
        """No other worker is left: let those be chosen again that may be."""
        self.excluded.difference_update(self._ended.keys() - self.failed)

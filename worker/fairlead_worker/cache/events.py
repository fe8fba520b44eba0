"""What the prefix cache began and ceased to hold, in order, for the index."""

from array import array
from typing import Literal

from fairlead_index.hashing import hash_bytes
from fairlead_worker.messages import CacheEvent

Kind = Literal["stored", "removed"]


class EventLog:
    """Block hashes stored and removed since the last drain.

    The cache appends in the order of its own changes: a parent is stored before its child and removed after it, so whoever applies
    the log in order holds a prefix-closed set at every moment.
    """

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[Kind, array[int]]] = []

    def add(self, kind: Kind, block: int) -> None:
        if self._runs and self._runs[-1][0] == kind:
            self._runs[-1][1].append(block)
        else:
            self._runs.append((kind, array("Q", (block,))))

    def drain(self) -> tuple[CacheEvent, ...]:
        """The events since the last call, neighbours of one kind joined."""
        if not self._runs:
            return ()
        runs, self._runs = self._runs, []
        return tuple(CacheEvent(kind, hash_bytes(hashes)) for kind, hashes in runs)

"""The log of blocks that the prefix cache stored and removed, for the index."""

from array import array
from typing import Literal

from fairlead_index.hashing import hash_bytes
from fairlead_worker.ipc.messages import CacheEvent

Kind = Literal["stored", "removed"]


class EventLog:
    """Block hashes stored and removed since the last drain.

    The log has the order of the cache's changes. A parent is stored before its child and removed after it, so a reader that applies the log
    in order always has a prefix-closed set.
    """

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[Kind, array[int], int]] = []

    def add_stored(self, block: int, parent: int) -> None:
        """Record a stored block, given its hash and its parent's."""
        if self._runs and self._runs[-1][0] == "stored" and self._runs[-1][1][-1] == parent:
            self._runs[-1][1].append(block)
        else:
            self._runs.append(("stored", array("Q", (block,)), parent))

    def add_removed(self, block: int) -> None:
        """Record a removed block, given its hash."""
        if self._runs and self._runs[-1][0] == "removed":
            self._runs[-1][1].append(block)
        else:
            self._runs.append(("removed", array("Q", (block,)), 0))

    def drain(self) -> tuple[CacheEvent, ...]:
        """Return the events since the last call. One event has a chain of stored blocks, or a run of removed blocks."""
        if not self._runs:
            return ()
        runs, self._runs = self._runs, []
        return tuple(CacheEvent(kind, hash_bytes(hashes), parent) for kind, hashes, parent in runs)

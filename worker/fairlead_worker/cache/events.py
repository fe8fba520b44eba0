"""The log of blocks that the index shall show: those of the prefix cache, and those that waiting requests will compute."""

from array import array
from collections.abc import Collection
from typing import Literal

from fairlead_index.hashing import hash_bytes
from fairlead_worker.ipc.messages import CacheEvent

Kind = Literal["stored", "removed"]


class EventLog:
    """Block hashes stored and removed since the last drain.

    The log has the order of the changes. A parent is stored before its child and removed after it, so a reader that applies the log in
    order always has a prefix-closed set.

    A block is shown while it is cached or promised by an accepted request. Without promises a router learns of a prompt only when it is
    computed. With a long queue that is too late: in the simulator at 1.2 times capacity the hit rate falls from 35 % to 24 %
    (`python -m bench router/congestion`).
    """

    __slots__ = ("_promises", "_runs")

    def __init__(self) -> None:
        self._runs: list[tuple[Kind, array[int], int]] = []
        self._promises: dict[int, int] = {}
        """Requests that promise each block, by hash. A request promises all ancestors of a block too, so parents come first."""

    def promise(self, blocks: "array[int]", root: int, cached: int) -> None:
        """Show the blocks of a request that waits, parents first. `cached`: how many of the first ones are cached."""
        promises, parent = self._promises, root
        for index, block in enumerate(blocks):
            if block not in promises and index >= cached:
                self._add_stored(block, parent)
            promises[block] = promises.get(block, 0) + 1
            parent = block

    def withdraw(self, blocks: "array[int]", cached: int) -> None:
        """Undo `promise` when the request ends. `cached`: how many of the first blocks are cached now."""
        promises = self._promises
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            left = promises[block] = promises[block] - 1
            if not left:
                del promises[block]
                if index >= cached:
                    self._add_removed(block)

    @property
    def promised(self) -> Collection[int]:
        """The promised blocks, cached or not, parents first."""
        return self._promises.keys()

    def add_stored(self, block: int, parent: int) -> None:
        """Log that the cache stored a block."""
        if block not in self._promises:
            self._add_stored(block, parent)

    def add_removed(self, block: int) -> None:
        """Log that the cache removed a block."""
        if block not in self._promises:
            self._add_removed(block)

    def _add_stored(self, block: int, parent: int) -> None:
        if self._runs and self._runs[-1][0] == "stored" and self._runs[-1][1][-1] == parent:
            self._runs[-1][1].append(block)
        else:
            self._runs.append(("stored", array("Q", (block,)), parent))

    def _add_removed(self, block: int) -> None:
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

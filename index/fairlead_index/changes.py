"""What a worker holds, and what of it the index has not been told: no I/O, no clock."""

from array import array
from collections import deque
from collections.abc import Iterable
from typing import Final, Literal

from fairlead_index.hashing import hash_bytes

Kind = Literal["S", "R"]
Run = tuple[Kind, "array[int]"]
"""Hashes stored, or removed, one after the other."""

SLACK: Final = 65536


class Changes:
    """The held set, parents before children, and the changes since the index was last told.

    While nobody follows, changes only move the held set, so a Redis that is away costs no memory. A backlog longer than the held set
    itself is thrown away: telling the whole set again is shorter.
    """

    def __init__(self) -> None:
        self._held: dict[int, None] = {}  # insertion order; a block comes back only after its children went, so parents stay first
        self._runs: deque[Run] = deque()
        self._following = False
        self._removals_only = False
        self.pending = 0
        """Changes not handed out yet."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held(self) -> "array[int]":
        """Hashes held, parents before children."""
        return array("Q", self._held)

    @property
    def following(self) -> bool:
        """Whether handing out all that is pending makes the index equal to the held set. False after the backlog was thrown away."""
        return self._following

    def stored(self, hashes: Iterable[int]) -> None:
        held = self._held
        new = array("Q")
        for value in hashes:
            if value not in held:
                held[value] = None
                new.append(value)
        self._note("S", new)

    def removed(self, hashes: Iterable[int]) -> None:
        held = self._held
        gone = array("Q")
        for value in hashes:
            if value in held:
                del held[value]
                gone.append(value)
        self._note("R", gone)

    def restart(self) -> None:
        """The index knows nothing: hand out the whole held set, and follow it from now on."""
        self.forget()
        self._following = True
        self._note("S", self.held)

    def forget(self) -> None:
        """Nobody listens: drop what is pending."""
        self._runs.clear()
        self.pending = 0
        self._following = False
        self._removals_only = False

    def keep_removals(self) -> None:
        """The index takes nothing new: hand out removals only, until `restart`. What the index holds stays a part of the held set."""
        self._removals_only = True
        runs = [run for run in self._runs if run[0] == "R"]
        self._runs = deque(runs)
        self.pending = sum(len(hashes) for _, hashes in runs)

    def take(self, limit: int) -> list[Run]:
        """The next changes, at most `limit` of them, in order."""
        batch: list[Run] = []
        while self._runs and limit > 0:
            kind, hashes = self._runs.popleft()
            if len(hashes) > limit:
                self._runs.appendleft((kind, hashes[limit:]))
                hashes = hashes[:limit]
            batch.append((kind, hashes))
            limit -= len(hashes)
            self.pending -= len(hashes)
        return batch

    def _note(self, kind: Kind, hashes: "array[int]") -> None:
        if not self._following or not hashes or (kind == "S" and self._removals_only):
            return
        self.pending += len(hashes)
        if self._runs and self._runs[-1][0] == kind:
            self._runs[-1][1].extend(hashes)
        else:
            self._runs.append((kind, hashes))
        if self.pending > len(self._held) + SLACK:
            self.forget()


def pack(batch: list[Run]) -> list[bytes]:
    """Runs as the `apply` script takes them."""
    return [part for kind, hashes in batch for part in (kind.encode(), hash_bytes(hashes))]

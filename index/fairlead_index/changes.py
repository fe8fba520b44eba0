"""What a worker holds, and what of it the index has not been told: no I/O, no clock."""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from fairlead_index.hashing import hash_bytes

Kind = Literal["S", "R"]

RUN_BLOCKS: Final = 6  # of a record in Redis (RUN in scripts/common.lua): with a few holders it still is an entry of a compact hash
PLACE_BITS: Final = 3
PLACE: Final = (1 << PLACE_BITS) - 1
LAST: Final = RUN_BLOCKS - 1
SLACK: Final = 65536


@dataclass(slots=True)
class Change:
    """Blocks stored, or removed, along one run. `path` are its blocks from the first on, of which `before` do not change."""

    kind: Kind
    path: "array[int]"
    before: int

    @property
    def blocks(self) -> int:
        return len(self.path) - self.before


class Changes:
    """The held set, parents before children, and the changes since the index was last told.

    While nobody follows, changes only move the held set, so a Redis that is away costs no memory. A backlog longer than the held set
    itself is thrown away: telling the whole set again is shorter.

    The blocks of a prompt are told by runs of RUN_BLOCKS, counted from its beginning, for Redis keeps them so.
    """

    def __init__(self) -> None:
        # Block -> its parent's hash, and in the lowest bits its place in its run. In insertion order: a block comes back only after those
        # that follow it went, so parents stay first.
        self._held: dict[int, int] = {}
        self._untold: deque[int] = deque()  # of the held set when it began to be told, what was not handed out; before all changes
        self._changes: deque[Change] = deque()
        self._following = False
        self._removals_only = False
        self.pending = 0
        """Blocks of changes not handed out yet."""

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

    def store(self, hashes: Iterable[int], parent: int = 0) -> None:
        """Blocks that follow each other, the first of them `parent`. Behind one that is not held, as a root is not, begins a prompt."""
        held, tells = self._held, self._following and not self._removals_only
        above = held.get(parent)
        place = LAST if above is None else above & PLACE
        path: array[int] | None = None  # of the change that the next block belongs to
        for value in hashes:
            entry = held.get(value)
            if entry is None:
                place = 0 if place == LAST else place + 1
                held[value] = parent << PLACE_BITS | place
                if not tells:
                    pass
                elif place and path is not None:
                    path.append(value)
                    self.pending += 1
                else:
                    path = self._tell_stored(value, parent, place)
            else:
                place, path = entry & PLACE, None
            parent = value
        self._bound()

    def remove(self, hashes: Iterable[int]) -> None:
        """Blocks, each after all that follow it."""
        held, last = self._held, self._changes[-1] if self._changes else None
        for value in hashes:
            entry = held.get(value)
            if entry is None:
                continue
            if self._following:
                place = entry & PLACE
                if last is not None and last.kind == "R" and last.before == place + 1 and last.path[place] == value:
                    last.before = place
                    self.pending += 1
                else:
                    last = self._append("R", self._path(value), place)
            del held[value]
        self._bound()

    def restart(self) -> None:
        """The index knows nothing: hand out the whole held set, and follow it from now on."""
        self.forget()
        self._following = True
        self._untold = deque(self._held)
        self.pending = len(self._untold)

    def forget(self) -> None:
        """Nobody listens: drop what is pending."""
        self._changes.clear()
        self._untold.clear()
        self.pending = 0
        self._following = False
        self._removals_only = False

    def keep_removals(self) -> None:
        """The index takes nothing new: hand out removals only, until `restart`. What the index holds stays a part of the held set."""
        self._removals_only = True
        self._untold.clear()
        self._changes = deque(change for change in self._changes if change.kind == "R")
        self.pending = sum(change.blocks for change in self._changes)

    def take(self, limit: int) -> list[Change]:
        """The next changes, in order, until they are `limit` blocks or more, by less than a run."""
        batch = self._take_untold(limit)
        limit -= sum(change.blocks for change in batch)
        while self._changes and limit > 0 and not self._untold:
            change = self._changes.popleft()
            batch.append(change)
            limit -= change.blocks
            self.pending -= change.blocks
        return batch

    def _take_untold(self, limit: int) -> list[Change]:
        """Piece by piece, for a large set takes a while. A block that went meanwhile is left out: that it went is among the changes."""
        batch: list[Change] = []
        path: array[int] | None = None
        untold = self._untold
        while untold and limit > 0:
            value = untold.popleft()
            self.pending -= 1
            entry = self._held.get(value)
            if entry is None:
                continue
            if path is not None and entry & PLACE and path[-1] == entry >> PLACE_BITS:
                path.append(value)
            else:
                path = self._path(value)
                batch.append(Change("S", path, entry & PLACE))
            limit -= 1
        return batch

    def _tell_stored(self, value: int, parent: int, place: int) -> "array[int]":
        last = self._changes[-1] if self._changes else None
        if place and last is not None and last.kind == "S" and last.path[-1] == parent:
            last.path.append(value)
            self.pending += 1
            return last.path
        return self._append("S", self._path(value), place).path

    def _append(self, kind: Kind, path: "array[int]", before: int) -> Change:
        change = Change(kind, path, before)
        self._changes.append(change)
        self.pending += change.blocks
        return change

    def _path(self, value: int) -> "array[int]":
        """The blocks of a run up to a held one."""
        path = array("Q", (value,))
        while (entry := self._held.get(value, 0)) & PLACE:
            value = entry >> PLACE_BITS
            path.append(value)
        path.reverse()
        return path

    def _bound(self) -> None:
        if len(self._changes) > len(self._held) + SLACK:
            self.forget()


def pack(batch: list[Change]) -> list[bytes]:
    """Changes as the `apply` script takes them."""
    return [change.kind.encode() + bytes((change.before,)) + hash_bytes(change.path) for change in batch]

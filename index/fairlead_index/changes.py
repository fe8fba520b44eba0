"""The blocks that a worker holds, and the changes not sent to the index yet. No I/O, no clock."""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from fairlead_index.hashing import hash_bytes

Kind = Literal["S", "R"]

RUN_BLOCKS: Final = 6  # per record in Redis (RUN in scripts/common.lua): with a few holders it still fits a compact hash entry
POSITION_BITS: Final = 3
POSITION_MASK: Final = (1 << POSITION_BITS) - 1
LAST_POSITION: Final = RUN_BLOCKS - 1
BACKLOG_MARGIN: Final = 65536


@dataclass(slots=True)
class Change:
    """Blocks stored or removed along one run. `path`: the run's blocks from its first. The first `before` of them do not change."""

    kind: Kind
    path: "array[int]"
    before: int

    @property
    def blocks(self) -> int:
        return len(self.path) - self.before


class Changes:
    """The held set, parents before children, and the changes not sent yet.

    While `following` is false, only the held set changes, so an unreachable Redis costs no memory. A backlog longer than the held set is
    dropped: a snapshot is shorter.

    Changes group a prompt's blocks in runs of RUN_BLOCKS, counted from its beginning, as Redis stores them.
    """

    def __init__(self) -> None:
        # Block -> its parent's hash, and in the lowest bits its position in its run. Insertion order keeps parents first: a block
        # returns only after its descendants were removed.
        self._held: dict[int, int] = {}
        self._unsent: deque[int] = deque()  # blocks of the snapshot still to send; they precede all changes
        self._changes: deque[Change] = deque()
        self._is_following = False
        self._removals_only = False
        self.pending = 0
        """Blocks not taken yet."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held(self) -> "array[int]":
        """Hashes held, parents before children."""
        return array("Q", self._held)

    @property
    def is_following(self) -> bool:
        """Whether sending all pending changes makes the index equal to the held set. False after the backlog was dropped."""
        return self._is_following

    def store(self, hashes: Iterable[int], parent: int = 0) -> None:
        """Add a chain of blocks after `parent`. A parent that is not held, such as a root, starts a prompt."""
        held, records = self._held, self._is_following and not self._removals_only
        parent_entry = held.get(parent)
        position = LAST_POSITION if parent_entry is None else parent_entry & POSITION_MASK
        path: array[int] | None = None  # path of the open change
        for value in hashes:
            entry = held.get(value)
            if entry is None:
                position = 0 if position == LAST_POSITION else position + 1
                held[value] = parent << POSITION_BITS | position
                if not records:
                    pass
                elif position and path is not None:
                    path.append(value)
                    self.pending += 1
                else:
                    path = self._append_stored(value, parent, position)
            else:
                position, path = entry & POSITION_MASK, None
            parent = value
        self._limit_backlog()

    def remove(self, hashes: Iterable[int]) -> None:
        """Remove blocks, children before parents."""
        held, last = self._held, self._changes[-1] if self._changes else None
        for value in hashes:
            entry = held.get(value)
            if entry is None:
                continue
            if self._is_following:
                position = entry & POSITION_MASK
                if last is not None and last.kind == "R" and last.before == position + 1 and last.path[position] == value:
                    last.before = position
                    self.pending += 1
                else:
                    last = self._append("R", self._path(value), position)
            del held[value]
        self._limit_backlog()

    def restart(self) -> None:
        """Send the whole held set, then every change."""
        self.forget()
        self._is_following = True
        self._unsent = deque(self._held)
        self.pending = len(self._unsent)

    def forget(self) -> None:
        """Drop all pending changes until `restart`."""
        self._changes.clear()
        self._unsent.clear()
        self.pending = 0
        self._is_following = False
        self._removals_only = False

    def keep_removals(self) -> None:
        """Send removals only until `restart`, as the index takes no new blocks. Its blocks stay a subset of the held set."""
        self._removals_only = True
        self._unsent.clear()
        self._changes = deque(change for change in self._changes if change.kind == "R")
        self.pending = sum(change.blocks for change in self._changes)

    def take(self, limit: int) -> list[Change]:
        """Return the next changes, in order, of `limit` blocks or up to one run more."""
        batch = self._take_snapshot(limit)
        limit -= sum(change.blocks for change in batch)
        while self._changes and limit > 0 and not self._unsent:
            change = self._changes.popleft()
            batch.append(change)
            limit -= change.blocks
            self.pending -= change.blocks
        return batch

    def _take_snapshot(self, limit: int) -> list[Change]:
        """Return the next part of the snapshot. A block removed meanwhile is skipped; its removal is among the changes."""
        batch: list[Change] = []
        path: array[int] | None = None
        unsent = self._unsent
        while unsent and limit > 0:
            value = unsent.popleft()
            self.pending -= 1
            entry = self._held.get(value)
            if entry is None:
                continue
            if path is not None and entry & POSITION_MASK and path[-1] == entry >> POSITION_BITS:
                path.append(value)
            else:
                path = self._path(value)
                batch.append(Change("S", path, entry & POSITION_MASK))
            limit -= 1
        return batch

    def _append_stored(self, value: int, parent: int, position: int) -> "array[int]":
        last = self._changes[-1] if self._changes else None
        if position and last is not None and last.kind == "S" and last.path[-1] == parent:
            last.path.append(value)
            self.pending += 1
            return last.path
        return self._append("S", self._path(value), position).path

    def _append(self, kind: Kind, path: "array[int]", before: int) -> Change:
        change = Change(kind, path, before)
        self._changes.append(change)
        self.pending += change.blocks
        return change

    def _path(self, value: int) -> "array[int]":
        """Return the run's blocks from its first up to a held one."""
        path = array("Q", (value,))
        while (entry := self._held.get(value, 0)) & POSITION_MASK:
            value = entry >> POSITION_BITS
            path.append(value)
        path.reverse()
        return path

    def _limit_backlog(self) -> None:
        if len(self._changes) > len(self._held) + BACKLOG_MARGIN:
            self.forget()


def pack(batch: list[Change]) -> list[bytes]:
    """Encode changes for the `apply` script."""
    return [change.kind.encode() + bytes((change.before,)) + hash_bytes(change.path) for change in batch]

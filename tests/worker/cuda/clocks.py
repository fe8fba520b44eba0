"""Vector clocks: which accesses to memory are ordered, whatever the speed of each stream."""

from dataclasses import dataclass, field
from typing import NamedTuple

HOST = 0
"""The host's number among the actors; streams are numbered from 1."""
Clock = dict[int, int]
"""Actor -> number of its latest operation that is known to be complete."""


def join(*clocks: Clock) -> Clock:
    """Return the clock that knows what any of `clocks` knows."""
    joined: Clock = {}
    for clock in clocks:
        for actor, time in clock.items():
            joined[actor] = max(joined.get(actor, 0), time)
    return joined


class Access(NamedTuple):
    """An operation of `actor` on bytes `begin` to `end` of a block."""

    actor: int
    time: int
    begin: int
    end: int
    what: str

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.actor, 0) >= self.time


@dataclass(slots=True)
class History:
    """The accesses to one block that later ones may have to follow."""

    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)

    def read(self, access: Access, clock: Clock) -> list[Access]:
        """Add a read by an actor that knows `clock`. Return the writes that it is not ordered after."""
        unordered = _unordered(self.writes, access, clock)
        self.reads = [old for old in self.reads if not (old.is_before(clock) and _covers(access, old))]
        self.reads.append(access)
        return unordered

    def write(self, access: Access, clock: Clock) -> list[Access]:
        """Add a write by an actor that knows `clock`. Return the accesses that it is not ordered after."""
        unordered = _unordered(self.writes, access, clock) + _unordered(self.reads, access, clock)
        self.writes = [old for old in self.writes if not _covers(access, old)]
        self.reads = [old for old in self.reads if not _covers(access, old)]
        self.writes.append(access)
        return unordered

    def unfinished(self, clock: Clock) -> list[Access]:
        """Return the accesses that `clock` does not know to be complete."""
        return [access for access in (*self.writes, *self.reads) if not access.is_before(clock)]


def _unordered(earlier: list[Access], access: Access, clock: Clock) -> list[Access]:
    return [old for old in earlier if old.begin < access.end and access.begin < old.end and not old.is_before(clock)]


def _covers(access: Access, old: Access) -> bool:
    return access.begin <= old.begin and old.end <= access.end

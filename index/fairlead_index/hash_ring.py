"""Consistent hashing (Karger et al. 1997): finds a prompt's home worker in logarithmic time."""

from bisect import bisect_left, insort
from collections.abc import Collection, Container, Iterable
from functools import lru_cache
from hashlib import sha1
from itertools import chain, islice
from typing import Final

POINTS: Final = 10
"""Points per member. More would balance homes better."""
FEW: Final = 8
"""Members that are inserted one by one."""
SEEN: Final = 64
"""Limit of points scanned in each direction."""


class Ring:
    """Members (addresses) by their points on a ring. The homes of a place are the first members after it."""

    def __init__(self, members: Iterable[str] = ()) -> None:
        self._points: list[tuple[int, str]] = []
        """Sorted by place."""
        self._members: set[str] = set()
        self.add_all(members)

    def __contains__(self, member: str) -> bool:
        return member in self._members

    def add(self, member: str) -> None:
        if member not in self._members:
            self._members.add(member)
            for point in points_of(member):
                insort(self._points, (point, member))

    def add_all(self, members: Iterable[str]) -> None:
        """Add members: many of them by one sort, as each insertion moves half of the points."""
        added = set(members) - self._members
        if len(added) < FEW:
            for member in added:
                self.add(member)
            return
        self._members |= added
        self._points += [(point, member) for member in added for point in points_of(member)]
        self._points.sort()

    def discard_all(self, members: Collection[str]) -> None:
        """Remove members in one pass."""
        gone = self._members.intersection(members)
        if gone:
            self._members -= gone
            self._points = [each for each in self._points if each[1] not in gone]

    def home(self, place: int, allowed: Container[str]) -> str | None:
        """Return the first member after `place` that is in `allowed`, as `homes` does, or None.

        The first point's member is tried alone: it is usually the one, and a list would cost more than the search.
        """
        points = self._points
        if not points:
            return None
        at = bisect_left(points, (place & 0xFFFFFFFF,))
        first = points[at if at < len(points) else 0][1]
        if first in allowed:
            return first
        homes = self.homes(place, 1, allowed)
        return homes[0] if homes else None

    def homes(self, place: int, count: int, allowed: Container[str] | None = None) -> list[str]:
        """Return the first `count` members after `place` (the lowest 32 bits of a block's hash) that are in `allowed` (None: all).
        Return fewer if the scanned points have no more."""
        points = self._points
        begin = bisect_left(points, (place & 0xFFFFFFFF,))
        found: list[str] = []
        for at in chain(islice(range(begin, len(points)), SEEN), islice(range(begin), SEEN)):
            member = points[at][1]
            if member not in found and (allowed is None or member in allowed):
                found.append(member)
                if len(found) == count:
                    break
        return found


@lru_cache(maxsize=4096)
def points_of(member: str) -> tuple[int, ...]:
    """Return the member's places."""
    return tuple(int(sha1(f"{member}#{n}".encode(), usedforsecurity=False).hexdigest()[:8], 16) for n in range(POINTS))

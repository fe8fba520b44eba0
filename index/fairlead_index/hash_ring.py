"""Consistent hashing (Karger et al. 1997): finds a prompt's home worker in logarithmic time."""

from bisect import bisect_left, insort
from collections.abc import Collection, Container, Iterable
from functools import lru_cache
from hashlib import sha1
from typing import Final

POINTS: Final = 10
"""Points per member. More would balance homes better."""
FEW: Final = 8
"""Members that are inserted one by one."""
SEEN: Final = 64
"""Limit of points scanned in each direction."""


class Ring:
    """Members (addresses) by their points on a ring."""

    def __init__(self) -> None:
        self._points: list[tuple[int, str]] = []
        """Sorted by place."""
        self._members: set[str] = set()

    def add_all(self, members: Iterable[str]) -> None:
        """Add members: many of them by one sort, as each insertion moves half of the points."""
        added = set(members) - self._members
        self._members |= added
        points = [(point, member) for member in added for point in points_of(member)]
        if len(added) < FEW:
            for each in points:
                insort(self._points, each)
        else:
            self._points += points
            self._points.sort()

    def discard_all(self, members: Collection[str]) -> None:
        """Remove members in one pass."""
        gone = self._members.intersection(members)
        if gone:
            self._members -= gone
            self._points = [each for each in self._points if each[1] not in gone]

    def home(self, place: int, allowed: Container[str]) -> str | None:
        """Return the first member after `place` (the lowest 32 bits of a block's hash) that is in `allowed`; None if no scanned point has
        one."""
        points = self._points
        begin = bisect_left(points, (place & 0xFFFFFFFF,))
        for _, member in points[begin : begin + SEEN]:
            if member in allowed:
                return member
        for _, member in points[: min(begin, SEEN)]:
            if member in allowed:
                return member
        return None


@lru_cache(maxsize=4096)
def points_of(member: str) -> tuple[int, ...]:
    """Return the member's places."""
    return tuple(int(sha1(f"{member}#{n}".encode(), usedforsecurity=False).hexdigest()[:8], 16) for n in range(POINTS))

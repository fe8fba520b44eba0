"""Workers by how soon each could begin a prompt, kept in order while they change, so that a choice looks at the first few only."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping


class StartOrder:
    """Members by key, the smallest first. A change moves pointers of a list: under a microsecond at a thousand members."""

    def __init__(self) -> None:
        self._keys: dict[str, float] = {}
        self._sorted: list[tuple[float, str]] = []

    def __iter__(self) -> Iterator[str]:
        """The members in order. Not to be changed meanwhile."""
        return (member for _, member in self._sorted)

    def replace(self, keys: Mapping[str, float]) -> None:
        """All members anew."""
        self._keys = dict(keys)
        self._sorted = sorted((key, member) for member, key in keys.items())

    def set(self, member: str, key: float) -> None:
        """Adds a member or moves it."""
        self.discard(member)
        self._keys[member] = key
        insort(self._sorted, (key, member))

    def move(self, member: str, by: float) -> None:
        """Adds to a member's key; nothing happens to one that is unknown."""
        if (key := self._keys.get(member)) is not None:
            self.set(member, key + by)

    def discard(self, member: str) -> None:
        key = self._keys.pop(member, None)
        if key is not None:
            del self._sorted[bisect_left(self._sorted, (key, member))]

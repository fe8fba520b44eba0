"""The lease of a request whose layers are in groups: a page table for each group."""

from array import array
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from fairlead_worker.cache.groups import CacheGroups
from fairlead_worker.cache.node import Node
from fairlead_worker.cache.pages import KvLease, PagePool


class LeaseOwner(Protocol):
    """The part of the prefix cache that such a lease needs."""

    pool: PagePool
    groups: CacheGroups

    def unlock(self, place: Node) -> None: ...

    def release_window(self, place: Node, held: "deque[Node]") -> None: ...


class PageTable(array):  # type: ignore[type-arg]  # array[int] cannot be a base at run time
    """The page table of a request's first group, with those of the others. Entries behind the window are outdated: no kernel reads them."""

    __slots__ = ("others",)
    others: "list[array[int]]"


class GroupedLease(KvLease[Node]):
    """The pages of one request. Window tables hold nothing before page `first`, and `shared` divides them as it divides `pages`."""

    __slots__ = ("_cache", "first", "held", "windows")

    def __init__(self, cache: LeaseOwner, place: Node, table: PageTable, first: int, held: Iterable[Node]) -> None:
        """`held`: the nodes from page `first` to `place`, whose window pages are leased."""
        super().__init__(cache.pool, cache, place, ())
        self._cache = cache
        self.pages = table
        self.shared = len(table)
        self.windows = table.others if cache.groups.full else [table, *table.others]
        self.first = first
        self.held = deque(held)

    @property
    def tables(self) -> "list[array[int]]":
        """Return the page table of each group."""
        return [self.pages, *self.windows] if self._cache.groups.full else self.windows

    @property
    def window_pages(self) -> int:
        """Pages that each window group holds."""
        return len(self.windows[0]) - self.first

    def trim(self, tokens: int) -> None:
        """Free the private pages that lie entirely after the first `tokens` tokens."""
        kept = max(-(-tokens // self._pool.page_size), self.shared)
        for table in self.tables:
            if kept < len(table):
                self._pool.give_back(table[kept:])
                del table[kept:]

    def release(self) -> None:
        """Release all pages: private ones become free, cached ones evictable unless another request uses them."""
        place, self._place = self._place, None
        if place is None:
            return
        if self._cache.groups.full:
            self._pool.give_back(self.pages[self.shared :])
        for table in self.windows:
            self._pool.give_back(table[max(self.first, self.shared) :])
        self.pages, self.windows, self.shared = array("i"), [], 0
        self._cache.release_window(place, self.held)
        self._cache.unlock(place)

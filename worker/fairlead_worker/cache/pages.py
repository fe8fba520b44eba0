"""The page pool, and the lease, through which a request holds its pages."""

from array import array
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

PlaceT = TypeVar("PlaceT")
HeldT = TypeVar("HeldT", contravariant=True)

MAX_PAGE_SIZE = 64
"""Tokens. Above it, a prefix hit loses more tokens to rounding than larger copies save (SGLang stops at 64, vLLM at 128)."""


class OutOfPages(RuntimeError):
    """More pages are requested than are free or evictable. The scheduler checks before it requests pages, so this is a bug."""


class PagePool:
    """Pages 0 .. total - 1, each in one state: free, leased (private to a request) or cached (owned by the prefix cache)."""

    __slots__ = ("_free", "cached", "leased", "page_size", "total")

    def __init__(self, total: int, page_size: int) -> None:
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page size must be 1 to {MAX_PAGE_SIZE} tokens, not {page_size}")
        if total < 1:
            raise ValueError(f"the KV cache needs at least one page, not {total}: raise --kv-pages or --kv-cache-memory-bytes")
        self.total = total
        self.page_size = page_size
        self.leased = 0
        self.cached = 0
        self._free = list(range(total - 1, -1, -1))  # a stack that starts with the lowest page; the last freed page is reused first

    @property
    def free(self) -> int:
        return len(self._free)

    def free_pages(self) -> frozenset[int]:
        """Return the free pages, for tests and diagnosis."""
        return frozenset(self._free)

    def take(self, count: int) -> list[int]:
        """Lease `count` free pages and return them."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages requested, {len(self._free)} free of {self.total}")
        if count == 1:
            self.leased += 1
            return [self._free.pop()]
        if not count:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        self.leased += count
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Free leased pages."""
        before = len(self._free)
        self._free.extend(pages)
        self.leased -= len(self._free) - before

    def move_to_cache(self, count: int) -> None:
        """Count `count` leased pages as cached: the prefix cache owns them now."""
        self.leased -= count
        self.cached += count

    def free_cached(self, pages: list[int]) -> None:
        """Free evicted pages."""
        self.cached -= len(pages)
        self._free.extend(pages)


class PrefixOwner(Protocol[HeldT]):
    """The part of the prefix cache that a lease needs, to unlock its place."""

    def unlock(self, place: HeldT) -> None: ...


class KvLease(Generic[PlaceT]):
    """The pages of one request: `pages[:shared]` belong to the prefix cache and are locked, `pages[shared:]` are its own.

    Only a lease holds a request's pages, and only `release` frees them. It also removes them from the lease, so that they cannot be freed
    twice and a released lease cannot be used.
    """

    __slots__ = ("_owner", "_place", "_pool", "loaded", "pages", "shared")

    def __init__(self, pool: PagePool, owner: PrefixOwner[PlaceT], place: PlaceT, prefix: Iterable[int], loaded: int = 0) -> None:
        """`place` is already locked for this lease. `prefix`: the pages down to it, the last `loaded` of them loaded from the host."""
        self._pool = pool
        self._owner = owner
        self._place: PlaceT | None = place
        self.pages = array("i", prefix)
        """The page table, int32. Do not keep a memoryview of it: an exported array cannot grow."""
        self.shared = len(self.pages)
        self.loaded = loaded

    @property
    def place(self) -> PlaceT:
        """The deepest cached page of this request: the cache's node."""
        if self._place is None:
            raise RuntimeError("this lease was released: its request needs a new one")
        return self._place

    def extend(self, pages: Iterable[int]) -> None:
        """Add pages taken from the pool."""
        assert self._place is not None, "a released lease cannot grow"
        self.pages.extend(pages)

    def use_cached(self, index: int, page: int) -> None:
        """Replace the private page at `index` by the cached `page` with the same tokens, and free the private one."""
        assert index >= self.shared, "only private pages may be exchanged"
        duplicate, self.pages[index] = self.pages[index], page
        self._pool.give_back((duplicate,))

    def trim(self, tokens: int) -> None:
        """Free the private pages that lie entirely after the first `tokens` tokens."""
        kept = max(-(-tokens // self._pool.page_size), self.shared)
        if kept < len(self.pages):
            self._pool.give_back(self.pages[kept:])
            del self.pages[kept:]

    def move_to(self, place: PlaceT, shared: int) -> None:
        """Share the first `shared` pages with the cache. `place`, locked by the caller, is the deepest of them. Unlock the old place."""
        before, self._place, self.shared = self.place, place, shared
        self._owner.unlock(before)

    def extend_shared(self, place: PlaceT, shared: int) -> None:
        """Share the first `shared` pages with the cache. The owner has moved this lease's lock to `place`, the last of them."""
        self._place = place
        self.shared = shared

    def release(self) -> None:
        """Release all pages: private ones become free, cached ones evictable unless another request uses them."""
        place, self._place = self._place, None
        if place is None:
            return
        pages, self.pages = self.pages, array("i")
        shared, self.shared = self.shared, 0
        self._pool.give_back(pages[shared:])
        self._owner.unlock(place)

"""Pages and their owners: the pool, and the lease, which is the only way for a request to hold pages."""

from array import array
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

PlaceT = TypeVar("PlaceT")
HeldT = TypeVar("HeldT", contravariant=True)

MAX_PAGE_SIZE = 64
"""Tokens. Beyond it a prefix hit loses more tokens to rounding than larger copies save (SGLang and vLLM stop at 64 and 128)."""


class OutOfPages(RuntimeError):
    """More pages were asked for than are free or evictable. The scheduler checks before it asks, so this is a bug."""


class PagePool:
    """Pages 0 .. total - 1, each in one state: free, leased (private to a request) or cached (owned by the prefix cache)."""

    __slots__ = ("_free", "cached", "leased", "page_size", "total")

    def __init__(self, total: int, page_size: int) -> None:
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page size must be 1 to {MAX_PAGE_SIZE} tokens, not {page_size}")
        if total < 1:
            raise ValueError(f"the KV cache needs at least one page, not {total}: give it more memory (--kv-pages, --kv-cache-bytes)")
        self.total = total
        self.page_size = page_size
        self.leased = 0
        self.cached = 0
        self._free = list(range(total - 1, -1, -1))  # a stack: the lowest pages first, the last used again soonest

    @property
    def free(self) -> int:
        return len(self._free)

    def free_pages(self) -> frozenset[int]:
        """Which pages are free; for tests and diagnosis."""
        return frozenset(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages, leased from now on."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages asked for, {len(self._free)} free of {self.total}")
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
        """Leased pages become free."""
        before = len(self._free)
        self._free.extend(pages)
        self.leased -= len(self._free) - before

    def move_to_cache(self, count: int) -> None:
        """`count` leased pages now belong to the prefix cache."""
        self.leased -= count
        self.cached += count

    def free_cached(self, pages: list[int]) -> None:
        """Evicted pages are free."""
        self.cached -= len(pages)
        self._free.extend(pages)


class PrefixOwner(Protocol[HeldT]):
    """The side of the prefix cache that a lease needs: to let go of the place that it holds."""

    def unlock(self, place: HeldT) -> None: ...


class KvLease(Generic[PlaceT]):
    """The pages of one request: `pages[:shared]` belong to the prefix cache and are locked, `pages[shared:]` are its own.

    A lease is the only holder of a request's pages, and `release` the only place where they are let go. It takes the pages out
    of the lease as it releases them, so there is nothing to release twice, and a released lease can be used no more.
    """

    __slots__ = ("_owner", "_place", "_pool", "loaded", "pages", "shared")

    def __init__(self, pool: PagePool, owner: PrefixOwner[PlaceT], place: PlaceT, prefix: Iterable[int], loaded: int = 0) -> None:
        """`place` is locked for this lease already; `prefix` are the pages down to it, the last `loaded` of them back from the host."""
        self._pool = pool
        self._owner = owner
        self._place: PlaceT | None = place
        self.pages = array("i", prefix)
        """The page table, int32: read it, or copy it; do not keep a memoryview, which would forbid it to grow."""
        self.shared = len(self.pages)
        self.loaded = loaded

    @property
    def place(self) -> PlaceT:
        """The deepest cached page of this request, in the cache's own terms."""
        if self._place is None:
            raise RuntimeError("this lease was released: its request must take a new one")
        return self._place

    def extend(self, pages: Iterable[int]) -> None:
        """Adds pages taken from the pool."""
        assert self._place is not None, "a released lease cannot grow"
        self.pages.extend(pages)

    def use_cached(self, index: int, page: int) -> None:
        """Uses the cached `page`, which holds the same tokens, instead of its own page at `index`, which becomes free."""
        assert index >= self.shared, "only private pages may be exchanged"
        duplicate, self.pages[index] = self.pages[index], page
        self._pool.give_back((duplicate,))

    def trim(self, tokens: int) -> None:
        """Gives its own pages back that lie wholly behind its first `tokens` tokens."""
        kept = max(-(-tokens // self._pool.page_size), self.shared)
        if kept < len(self.pages):
            self._pool.give_back(self.pages[kept:])
            del self.pages[kept:]

    def move_to(self, place: PlaceT, shared: int) -> None:
        """The first `shared` pages are the cache's now, and `place` (locked by the caller) the deepest of them."""
        before, self._place, self.shared = self.place, place, shared
        self._owner.unlock(before)

    def extend_shared(self, place: PlaceT, shared: int) -> None:
        """The first `shared` pages are the cache's now, and `place` the last of them. The owner has passed the lock on."""
        self._place = place
        self.shared = shared

    def release(self) -> None:
        """Lets go of everything: private pages become free, cached ones evictable unless another request holds them."""
        place, self._place = self._place, None
        if place is None:
            return
        pages, self.pages = self.pages, array("i")
        shared, self.shared = self.shared, 0
        self._pool.give_back(pages[shared:])
        self._owner.unlock(place)

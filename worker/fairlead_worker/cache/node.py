"""One cached page in the radix tree, and the queue in which unused leaves wait for their eviction."""

from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairlead_worker.cache.watch import Watch


class Node:
    """A page of tokens under its parent: on the device, in the host tier, or both. The root of a tree is nowhere and has no `parent`."""

    __slots__ = ("chain", "children", "depth", "here", "hits", "key", "page", "parent", "queued", "slot", "used", "users", "watchers")

    def __init__(self, parent: "Node | None", key: bytes, page: int, chain: int) -> None:
        self.parent = parent
        self.key = key
        """The page's token ids, as bytes of uint32: equal bytes under an equal parent are an equal prefix, with no collisions."""
        self.page = page
        """Of the device; -1: it is not there. A page on the device has its parent there."""
        self.slot = -1
        """Of the host tier; -1: it is not there."""
        self.chain = chain
        """Chained hash of the last whole block that ends at or above this page; the tree's root number where there is none."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Pages from the root to here, this one included."""
        self.children: dict[bytes, Node] = {}
        self.here = 0
        """Children on the device. 0, and no users: this page may be evicted from there."""
        self.users = 0
        """Leases that hold exactly this place, plus children with users. 0: nobody runs on this page."""
        self.used = 0
        """When the last user left, in the cache's own count."""
        self.hits = 0
        """Leases that attached here or below."""
        self.queued = False
        self.watchers: dict[bytes, dict[Watch, None]] | None = None
        """Waiting requests whose match ends here, by the page that they want next."""

    @property
    def cached(self) -> bool:
        """In either tier; False once evicted from both, and for roots."""
        return self.page >= 0 or self.slot >= 0


class LeafQueue:
    """Unused leaves of what is on the device, least recently used first.

    Each node has at most one entry, in a heap. A node that was used again keeps its old entry until that comes up: then it goes back
    with its new time, or leaves when it is in use or has children there. So a hit costs nothing here and an eviction O(log nodes).
    """

    __slots__ = ("_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._serial = 0

    def offer(self, node: Node) -> None:
        """`node` has become an unused leaf."""
        if not node.queued:
            node.queued = True
            self._serial += 1
            heappush(self._heap, (node.used, self._serial, node))

    def next(self, node: Node) -> Node | None:
        """`offer`, then `pop`. Of a branch that nobody uses one page goes after the other, so most often it is `node` itself that comes."""
        if not node.queued and (not self._heap or node.used <= self._heap[0][0]):
            return node
        self.offer(node)
        return self.pop()

    def pop(self) -> Node | None:
        """The unused leaf whose last use is the longest ago."""
        heap = self._heap
        while heap:
            used, serial, node = heap[0]
            if node.users or node.here:
                heappop(heap)
                node.queued = False
            elif node.used != used:
                heapreplace(heap, (node.used, serial, node))
            else:
                heappop(heap)
                node.queued = False
                return node
        return None

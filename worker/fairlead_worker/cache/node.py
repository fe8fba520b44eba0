"""Nodes of the radix tree, matches of waiting requests, and the eviction queue of unused leaves."""

from array import array
from heapq import heappop, heappush, heapreplace

NO_PAGE = b""
"""Key of a match that needs no further page. It equals no page's key, so only an eviction makes the match stale."""


class Node:
    """A page of tokens under its parent: on the device, in the host tier, or both. The root of a tree is nowhere and has no `parent`."""

    __slots__ = (
        "chain",
        "children",
        "depth",
        "device_children",
        "hits",
        "key",
        "last_access",
        "lock_ref",
        "page",
        "parent",
        "queued",
        "slot",
        "trackers",
    )

    def __init__(self, parent: "Node | None", key: bytes, page: int, chain: int) -> None:
        self.parent = parent
        self.key = key
        """The page's token ids, as bytes of uint32: equal bytes under an equal parent are an equal prefix, with no collisions."""
        self.page = page
        """Page number on the device; -1: not on the device. The parent of a page on the device is there too."""
        self.slot = -1
        """Slot of the host tier; -1: none."""
        self.chain = chain
        """Chained hash of the last whole block that ends at or above this page; the tree's root number where there is none."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Pages from the root to here, this one included."""
        self.children: dict[bytes, Node] = {}
        self.device_children = 0
        """Children on the device. With 0 children and `lock_ref` 0 this page may be evicted."""
        self.lock_ref = 0
        """Leases that end at this node, plus locked children. 0: no running request uses this page."""
        self.last_access = 0
        """When the latest lease was released, in the cache's logical time."""
        self.hits = 0
        """Leases that attached to this node or below."""
        self.queued = False
        self.trackers: dict[bytes, dict[PrefixMatch, None]] | None = None
        """Matches of waiting requests that end here, by the key of their next page."""

    @property
    def cached(self) -> bool:
        """In either tier; False once evicted from both, and for roots."""
        return self.page >= 0 or self.slot >= 0


class PrefixMatch:
    """The deepest cached node of one waiting request's tokens."""

    __slots__ = ("is_current", "is_removed", "key", "limit", "node", "root", "tokens")

    def __init__(self, root: Node, tokens: "array[int]", page_size: int, reusable: int) -> None:
        self.root = root
        self.node = root
        self.tokens = tokens
        self.limit = min(reusable, len(tokens) - 1) // page_size
        """Pages that may be reused: at least one token is left to compute, as its logits give the next one."""
        self.key = NO_PAGE
        self.is_current = False
        self.is_removed = False

    @property
    def depth(self) -> int:
        """Cached pages of the prompt; outdated unless `is_current`."""
        return self.node.depth


class LeafQueue:
    """Unused leaves on the device, least recently used first, whether requests wait for them or not (docs/benchmarks/overload.md).

    Each node has at most one entry, in a heap. A node that was used again keeps its old entry until that comes up: then it goes back
    with its new time, or leaves when it is in use or has children there. So a hit costs nothing here and an eviction O(log nodes).
    """

    __slots__ = ("_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._serial = 0

    def offer(self, node: Node) -> None:
        """Add a node that became an unused leaf."""
        if not node.queued:
            node.queued = True
            self._serial += 1
            heappush(self._heap, (node.last_access, self._serial, node))

    def next(self, node: Node) -> Node | None:
        """Do `offer`, then `pop`. An unused branch is evicted page by page, so the result is usually `node` itself."""
        if not node.queued and (not self._heap or node.last_access <= self._heap[0][0]):
            return node
        self.offer(node)
        return self.pop()

    def pop(self) -> Node | None:
        """Return the least recently used unused leaf, or None."""
        heap = self._heap
        while heap:
            used, serial, node = heap[0]
            if node.lock_ref or node.device_children:
                heappop(heap)
                node.queued = False
            elif node.last_access != used:
                heapreplace(heap, (node.last_access, serial, node))
            else:
                heappop(heap)
                node.queued = False
                return node
        return None

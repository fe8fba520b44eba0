"""A radix tree of the latest prompts by their block hashes, and the choice of its nodes for a page. Pure.

A block's hash covers its whole prefix, so equal hashes at a position mean that all blocks before it are equal too: the common prefix of two
prompts is found by bisection. Sorted prompts that share a prefix are neighbours, so one pass over them builds the tree (as a suffix tree is
built from a sorted suffix array).
"""

import heapq
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, repr=False)  # compared by identity: both would recurse
class PrefixNode:
    """A run of blocks that the same requests share. It ends where requests part, or where one ends."""

    chain: "array[int]"
    """Hashes of a request that begins with this prefix; the prefix is `chain[:end]`."""
    start: int
    """Blocks before this node's own."""
    end: int
    """Blocks up to the end of this node."""
    requests: int = 0
    """Requests that begin with the prefix."""
    children: "list[PrefixNode]" = field(default_factory=list)

    @property
    def prefix(self) -> "array[int]":
        return self.chain[: self.end]

    @property
    def heat(self) -> tuple[int, int]:
        """Order of nodes: blocks that requests after the first one could reuse, then blocks."""
        return (self.requests - 1) * self.end, self.end


@dataclass(frozen=True, slots=True)
class ShownNode:
    """A node of the page, in the order of the page: parents before children, the hottest first."""

    node: PrefixNode
    level: int
    """Number of its ancestors."""
    closes: int
    """Elements that end after it: its own if it has no shown child, and those of the ancestors whose last one it is."""
    hidden: int
    """Children that are not shown."""

    @property
    def is_leaf(self) -> bool:
        return self.closes > 0


def build_tree(chains: "Iterable[array[int]]") -> PrefixNode:
    """Return the root, an empty prefix that all requests share. Chains without a block are left out."""
    root = PrefixNode(array("Q"), 0, 0)
    path = [root]  # the nodes of the previous chain
    for chain in sorted(filter(len, chains), key=lambda one: one.tobytes()):
        shared = _common_blocks(path[-1], chain)
        _leave(path, shared)
        if len(chain) > shared:
            leaf = PrefixNode(chain, shared, len(chain))
            path[-1].children.append(leaf)
            path.append(leaf)
        path[-1].requests += 1
    _leave(path, 0)
    return root


def choose_nodes(root: PrefixNode, limit: int) -> list[ShownNode]:
    """Return at most `limit` nodes below the root, the hottest first among those whose parent is shown."""
    shown: set[PrefixNode] = set()
    order = 0
    frontier: list[tuple[tuple[int, int], int, PrefixNode]] = []

    def offer(node: PrefixNode) -> None:
        nonlocal order
        for child in node.children:
            order += 1
            heapq.heappush(frontier, ((-child.heat[0], -child.heat[1]), order, child))

    offer(root)
    while frontier and len(shown) < limit:
        node = heapq.heappop(frontier)[2]
        shown.add(node)
        offer(node)

    def shown_children(node: PrefixNode) -> list[PrefixNode]:
        return sorted((child for child in node.children if child in shown), key=lambda child: child.heat)

    rows: list[ShownNode] = []
    waiting = [(child, 0, 0) for child in shown_children(root)]  # node, level, elements that end with it
    while waiting:
        node, level, ending = waiting.pop()
        children = shown_children(node)
        rows.append(ShownNode(node, level, 0 if children else ending + 1, len(node.children) - len(children)))
        waiting += [(child, level + 1, ending + 1 if place == 0 else 0) for place, child in enumerate(children)]
    return rows


def find_holders(rows: Sequence[ShownNode], held: Mapping[int, Mapping[str, int]], block_tokens: int) -> list[set[str] | None]:
    """Return the addresses that hold each row's whole prefix; None where no leaf below it was looked up.

    `held`: tokens that each address holds of a leaf's prefix, by the leaf's place in `rows`. Who holds a block holds those before it.
    """
    found: list[set[str] | None] = [None] * len(rows)
    ancestors: list[int] = []
    for place, row in enumerate(rows):
        del ancestors[row.level :]
        ancestors.append(place)
        if (tokens_of := held.get(place)) is not None:
            for above in ancestors:
                enough = {address for address, tokens in tokens_of.items() if tokens >= rows[above].node.end * block_tokens}
                found[above] = enough | (found[above] or set())
    return found


def _common_blocks(node: PrefixNode, chain: "array[int]") -> int:
    low, high = 0, min(node.end, len(chain))
    while low < high:
        middle = (low + high + 1) // 2
        if node.chain[middle - 1] == chain[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _leave(path: list[PrefixNode], depth: int) -> None:
    """Shorten the path to `depth` blocks, splitting the node that crosses it, and add up the requests of the nodes left."""
    while path[-1].end > depth:
        node, parent = path.pop(), path[-1]
        if parent.end < depth:
            parent.children[-1] = parent = PrefixNode(node.chain, node.start, depth, 0, [node])
            node.start = depth
            path.append(parent)
        parent.requests += node.requests

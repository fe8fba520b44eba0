"""The hottest cached prefixes, for the warm-up of a new worker: those that most requests used."""

from heapq import heapify, heappop, heappush
from itertools import accumulate

from fairlead_worker.cache.node import Node
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.ipc.messages import HotPrefix

MIN_HITS = 1
"""Fewest hits of a hot page: an unused page is not worth sending."""
MAX_LENGTH_FACTOR = 16
"""Largest total length of the prefixes, as a multiple of the budget. Shared pages count once in the budget, but each prefix is sent whole.
For ten thousand questions about one document, which share all pages except one, the reply would be as long as ten thousand documents."""


def find_hot_prefixes(cache: PrefixCache, tokens: int) -> tuple[HotPrefix, ...]:
    """Return the hottest prefixes of all roots, hottest first, with at most `tokens` tokens together (shared pages counted once).

    Their summed length is at most MAX_LENGTH_FACTOR times `tokens`; the last ones are left out. A page's hits count every lease at or
    below it, so it has at most its parent's hits. Therefore greedy selection of the page with the most hits gives the best set, and this
    set contains each page's parents. The time depends on the selected pages and their children, not on the size of the cache.
    """
    heap: list[tuple[int, int, Node]] = []
    for root in cache.roots():
        heap += ((-child.hits, id(child), child) for child in root.children.values() if child.hits >= MIN_HITS)
    heapify(heap)
    left = tokens // cache.page_size
    taken: dict[Node, None] = {}
    while heap and left:
        _, _, node = heappop(heap)
        taken[node] = None
        left -= 1
        for child in node.children.values():
            if child.hits >= MIN_HITS:
                heappush(heap, (-child.hits, id(child), child))
    ends = [node for node in taken if not any(child in taken for child in node.children.values())]
    ends.sort(key=lambda node: -node.hits)
    longest = MAX_LENGTH_FACTOR * (tokens // cache.page_size)
    lengths = accumulate(node.depth for node in ends)
    return tuple(_prefix(node) for node, length in zip(ends, lengths, strict=True) if length <= longest)


def _prefix(node: Node) -> HotPrefix:
    keys = []
    step = node
    while step.parent is not None:
        keys.append(step.key)
        step = step.parent
    return HotPrefix(step.chain, b"".join(reversed(keys)))

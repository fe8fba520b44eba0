"""Which cached prefixes are worth most to a worker that has none: those that most requests attached to."""

from heapq import heapify, heappop, heappush
from itertools import accumulate

from fairlead_worker.cache.node import Node
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.messages import HotPrefix

MIN_HITS = 1
"""Fewest hits of a hot page: an unused page is not worth sending."""
MAX_LENGTH_FACTOR = 16
"""Limit of the prefixes' total length, as a multiple of the budget. Each prefix is sent whole: ten thousand questions about one long
document share all pages but one, and would be as long as ten thousand documents."""


def find_hot_prefixes(cache: PrefixCache, tokens: int) -> tuple[HotPrefix, ...]:
    """Prefixes of at most `tokens` tokens together (shared ones counted once), the hottest pages of all roots, hottest prefix first. The
    last ones are left out if all of them would be longer than MAX_LENGTH_FACTOR times as much.

    A page's hits count every lease at or below it, so none has more than its parent: taking the page with the most hits again and again
    gives the best set, and one that holds each page's parents. Time grows with the pages taken and their children, not with the cache.
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

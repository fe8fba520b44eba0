"""Track how much of each waiting request's prompt is cached, without a walk over all requests in every step.

A match is registered at the deepest cached node of its prompt, by the key of the next page. Publishing that page, or evicting that node,
makes the match stale. Only stale matches are walked again, at most `limit` per step. So ordering thousands of waiting requests by their
longest prefix costs as much as the changes, not as the queue.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator

from fairlead_worker.cache.node import NO_PAGE, Node, PrefixMatch


class PrefixMatches:
    """All prefix matches of one cache."""

    __slots__ = ("_is_resumable", "_page_bytes", "_page_size", "_stale")

    def __init__(self, page_size: int, is_resumable: Callable[[Node], bool] | None = None) -> None:
        """`is_resumable`: whether a request can continue after a node; None: after every one."""
        self._is_resumable = is_resumable
        self._page_size = page_size
        self._page_bytes = 4 * page_size
        self._stale: OrderedDict[PrefixMatch, None] = OrderedDict()
        """Stale matches in the order of the changes. Removed matches leave it, because `refresh` may never be called."""

    def add(self, root: Node, tokens: "array[int]", reusable: int) -> PrefixMatch:
        """Track a prompt, of which at most the first `reusable` tokens may come from the cache."""
        match = PrefixMatch(root, tokens, self._page_size, reusable)
        self.update(match)
        return match

    def remove(self, match: PrefixMatch) -> None:
        """Stop tracking a match, stale or not."""
        match.is_removed = True
        self._stale.pop(match, None)
        if match.is_current:
            match.is_current = False
            trackers = match.node.trackers
            if trackers is not None and (same := trackers.get(match.key)) is not None:
                same.pop(match, None)
                if not same:
                    del trackers[match.key]
                if not trackers:
                    match.node.trackers = None

    def update(self, match: PrefixMatch) -> None:
        """Walk a stale match to the deepest cached node."""
        if match.is_current:
            return
        node = match.node
        while not node.cached and node.parent is not None:
            node = node.parent
        raw, size, depth = match.tokens.tobytes(), self._page_bytes, node.depth
        key = NO_PAGE
        while depth < match.limit:
            key = raw[depth * size : (depth + 1) * size]
            child = node.children.get(key)
            if child is None:
                break
            node, depth = child, depth + 1
        else:
            key = NO_PAGE
        if self._is_resumable is not None:
            while not self._is_resumable(node) and node.parent is not None:
                node, key = node.parent, node.key
        match.node, match.key, match.is_current = node, key, True
        if node.trackers is None:
            node.trackers = {}
        node.trackers.setdefault(key, {})[match] = None

    def on_published(self, node: Node, key: bytes) -> None:
        """Mark matches stale after a page with `key` was added under `node`."""
        if node.trackers is not None and (matches := node.trackers.pop(key, None)) is not None:
            self._mark_stale(matches)
            if not node.trackers:
                node.trackers = None

    def on_evicted(self, node: Node) -> None:
        """Mark matches stale after `node` was evicted. It still has its `parent`."""
        if node.trackers is not None:
            for matches in node.trackers.values():
                self._mark_stale(matches)
            node.trackers = None

    def _mark_stale(self, matches: dict[PrefixMatch, None]) -> None:
        for match in matches:
            match.is_current = False
        self._stale.update(matches)

    def refresh(self, limit: int) -> Iterator[PrefixMatch]:
        """Update up to `limit` stale matches and yield them: their depth may have changed."""
        for _ in range(min(limit, len(self._stale))):
            match, _ = self._stale.popitem(last=False)
            self.update(match)
            yield match

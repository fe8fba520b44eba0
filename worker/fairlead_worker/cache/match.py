"""How much of each waiting request's prompt is cached, kept current without looking at all of them at every step.

A watch rests at the deepest cached page of its prompt, under the page that it wants next. Publishing that page, or evicting the page
where it rests, unsettles it; only unsettled watches are walked again, and never more than `limit` of them in one step. So ordering
thousands of waiting requests by their longest prefix costs as much as the changes, not as the queue.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator

from fairlead_worker.cache.node import NO_PAGE, Node, PrefixMatch


class PrefixMatches:
    """All watches of one cache."""

    __slots__ = ("_page_bytes", "_page_size", "_stale")

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._page_bytes = 4 * page_size
        self._stale: OrderedDict[PrefixMatch, None] = OrderedDict()
        """Touched by changes since `refresh` last named them, in that order. Without those removed: nobody may ever call `refresh`."""

    def add(self, root: Node, tokens: "array[int]", reusable: int) -> PrefixMatch:
        match = PrefixMatch(root, tokens, self._page_size, reusable)
        self.update(match)
        return match

    def remove(self, match: PrefixMatch) -> None:
        """Forgets it, settled or not."""
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
        """Walks to the deepest cached page and rests there."""
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
        match.node, match.key, match.is_current = node, key, True
        if node.trackers is None:
            node.trackers = {}
        node.trackers.setdefault(key, {})[match] = None

    def on_published(self, node: Node, key: bytes) -> None:
        """A page with `key` has come under `node`."""
        if node.trackers is not None and (woken := node.trackers.pop(key, None)) is not None:
            self._mark_stale(woken)
            if not node.trackers:
                node.trackers = None

    def on_evicted(self, node: Node) -> None:
        """`node` is gone; its parent is still known to it."""
        if node.trackers is not None:
            for watches in node.trackers.values():
                self._mark_stale(watches)
            node.trackers = None

    def _mark_stale(self, watches: dict[PrefixMatch, None]) -> None:
        for match in watches:
            match.is_current = False
        self._stale.update(watches)

    def refresh(self, limit: int) -> Iterator[PrefixMatch]:
        """Settles up to `limit` watches that changes have unsettled, and names them: their depth may be another now."""
        for _turn in range(min(limit, len(self._stale))):
            match, _ = self._stale.popitem(last=False)
            self.update(match)
            yield match

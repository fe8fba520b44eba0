"""How much of each waiting request's prompt is cached, kept current without looking at all of them at every step.

A watch rests at the deepest cached page of its prompt, under the page that it wants next. Publishing that page, or evicting the page
where it rests, unsettles it; only unsettled watches are walked again, and never more than `limit` of them in one step. So ordering
thousands of waiting requests by their longest prefix costs as much as the changes, not as the queue.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator

from fairlead_worker.cache.node import NOTHING, Node, PrefixMatch


class PrefixMatches:
    """All watches of one cache."""

    __slots__ = ("_page_bytes", "_page_size", "_unsettled")

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._page_bytes = 4 * page_size
        self._unsettled: OrderedDict[PrefixMatch, None] = OrderedDict()
        """Touched by changes since `refresh` last named them, in that order. Without those removed: nobody may ever call `refresh`."""

    def add(self, root: Node, tokens: "array[int]", reusable: int) -> PrefixMatch:
        watch = PrefixMatch(root, tokens, self._page_size, reusable)
        self.settle(watch)
        return watch

    def remove(self, watch: PrefixMatch) -> None:
        """Forgets it, settled or not."""
        watch.removed = True
        self._unsettled.pop(watch, None)
        if watch.settled:
            watch.settled = False
            watchers = watch.node.watchers
            if watchers is not None and (same := watchers.get(watch.key)) is not None:
                same.pop(watch, None)
                if not same:
                    del watchers[watch.key]
                if not watchers:
                    watch.node.watchers = None

    def settle(self, watch: PrefixMatch) -> None:
        """Walks to the deepest cached page and rests there."""
        if watch.settled:
            return
        node = watch.node
        while not node.cached and node.parent is not None:
            node = node.parent
        raw, size, depth = watch.tokens.tobytes(), self._page_bytes, node.depth
        key = NOTHING
        while depth < watch.limit:
            key = raw[depth * size : (depth + 1) * size]
            child = node.children.get(key)
            if child is None:
                break
            node, depth = child, depth + 1
        else:
            key = NOTHING
        watch.node, watch.key, watch.settled = node, key, True
        if node.watchers is None:
            node.watchers = {}
        node.watchers.setdefault(key, {})[watch] = None

    def published(self, node: Node, key: bytes) -> None:
        """A page with `key` has come under `node`."""
        if node.watchers is not None and (woken := node.watchers.pop(key, None)) is not None:
            self._unsettle(woken)
            if not node.watchers:
                node.watchers = None

    def evicted(self, node: Node) -> None:
        """`node` is gone; its parent is still known to it."""
        if node.watchers is not None:
            for watches in node.watchers.values():
                self._unsettle(watches)
            node.watchers = None

    def _unsettle(self, watches: dict[PrefixMatch, None]) -> None:
        for watch in watches:
            watch.settled = False
        self._unsettled.update(watches)

    def refresh(self, limit: int) -> Iterator[PrefixMatch]:
        """Settles up to `limit` watches that changes have unsettled, and names them: their depth may be another now."""
        for _turn in range(min(limit, len(self._unsettled))):
            watch, _ = self._unsettled.popitem(last=False)
            self.settle(watch)
            yield watch

"""The blocks that the index sees of a cache whose nodes are not all resumable: a block is shown while it and all before it are."""

from collections.abc import Callable

from fairlead_worker.cache.events import EventLog
from fairlead_worker.cache.node import Node


class ShownBlocks:
    """The set of these blocks. It is prefix-closed, as the index needs it."""

    def __init__(self, block_pages: int, events: EventLog, is_resumable: Callable[[Node], bool]) -> None:
        self._block_pages, self._events, self._is_resumable = block_pages, events, is_resumable
        self.nodes: set[Node] = set()
        """The last node of each block."""

    def last_block(self, node: Node) -> Node:
        """Return the last node of the last whole block down to `node`; the root if there is none."""
        while node.depth % self._block_pages and node.parent is not None:
            node = node.parent
        return node

    def has_block_of(self, node: Node) -> bool:
        """Return whether the last whole block down to `node` is shown, and so all before it."""
        last = self.last_block(node)
        return last.parent is None or last in self.nodes

    def deepest(self, node: Node) -> Node:
        """Return the last node of the deepest block down to `node` that is shown; the root if there is none."""
        while node.parent is not None and node not in self.nodes:
            node = node.parent
        return node

    def depth_of(self, node: Node) -> int:
        """Return the pages down to `node` that the index can know: those of blocks that it sees, and pages after the last block."""
        return node.depth if self.has_block_of(node) else self.deepest(node).depth

    def on_resumable(self, node: Node) -> None:
        """Show the block that ends at `node`, which became resumable, and resumable ones below it, if all before it are shown."""
        if node.depth % self._block_pages or node.parent is None or not self.has_block_of(node.parent):
            return
        pending = [node]
        while pending:
            node = pending.pop()
            if not node.depth % self._block_pages:
                if node in self.nodes or not self._is_resumable(node):
                    continue
                assert node.parent is not None
                self.nodes.add(node)
                self._events.add_stored(node.chain, node.parent.chain)
            pending += node.children.values()

    def on_lost(self, node: Node) -> None:
        """Hide the block that ends at `node`, which is not resumable any more, and all below it, children first."""
        hidden, pending = [], [node] if node in self.nodes else []
        while pending:
            node = pending.pop()
            if not node.depth % self._block_pages:
                if node not in self.nodes:
                    continue
                self.nodes.remove(node)
                hidden.append(node.chain)
            pending += node.children.values()
        for chain in reversed(hidden):
            self._events.add_removed(chain)

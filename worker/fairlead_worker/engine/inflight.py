"""Prefixes that are being computed in this step, so that they are computed once (SGLang's in-batch prefix caching, without its delay
for the leader)."""

from fairlead_worker.cache.node import Node
from fairlead_worker.engine.request import Request


class OpenPrefixes:
    """What the prefilling rows of one plan will publish, by the cached page that it comes under.

    A waiting request that wants the same next tokens under the same page gets them from the cache one step later, as a follower; the
    leader itself waits for nobody. Only the next `tokens` are compared: as the leader publishes, its followers move along, and those
    that part from it find themselves without a leader. With `tokens` of 0 nobody follows.
    """

    __slots__ = ("_open", "_page_size", "_span")

    def __init__(self, tokens: int, page_size: int) -> None:
        self._page_size = page_size
        self._span = -(-tokens // page_size) * page_size
        self._open: set[tuple[Node, bytes]] = set()

    def open(self, request: Request, node: Node) -> None:
        """`request` is computed in this step from `node` on."""
        start = node.depth * self._page_size
        if self._span and start + self._span <= len(request.tokens):
            self._open.add((node, request.tokens[start : start + self._span].tobytes()))

    def computing(self, request: Request, node: Node) -> bool:
        """True when somebody computes what `request`, matched down to `node`, would compute first."""
        if not self._open:
            return False
        start = node.depth * self._page_size
        if start + self._span >= len(request.tokens):  # it could not use the last page of them: one token must be left
            return False
        return (node, request.tokens[start : start + self._span].tobytes()) in self._open

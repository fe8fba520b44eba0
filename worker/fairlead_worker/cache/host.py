"""The host tier: KV that the device has no room for, in a bounded pool of slots in the host's memory (as SGLang's HiCache).

Write-back, not write-through: a page is copied out when it is evicted. Until the device is full the tier costs nothing, no page is
copied that nobody would have missed, and the two tiers hold different pages, so that together they hold more. Pages never change once
they are published: one that came back keeps its slot while nobody else wants that, and its next eviction needs no copy.

Bookkeeping only: the copies are data for the runner, which does all saves of a plan, then all its loads, then the forward pass.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from fairlead_worker.cache.node import Node
from fairlead_worker.messages import HostLoad

Copy = tuple[int, int]
"""(device page, host slot)."""


class HostTier:
    """Slots 0 .. total - 1, each free or held by the one node whose `slot` it is.

    Of the nodes with a slot some are on the device as well, the others only here. The latter are given up in the order in which they left
    the device. A page leaves the device after all pages under it have, and nothing comes under it until it is back: so the first in that
    order is always a leaf, and what the two tiers hold together stays prefix-closed.
    """

    __slots__ = (
        "_forget",
        "_free",
        "_host_only",
        "_loading",
        "_loads",
        "_on_both",
        "_saves",
        "dropped_pages",
        "loaded_pages",
        "saved_pages",
        "total",
    )

    def __init__(self, slots: int, forget: Callable[[Node], None]) -> None:
        """`forget` takes a node that is in neither tier any more out of the tree."""
        if slots < 1:
            raise ValueError(f"the host tier needs at least one slot, not {slots}")
        self.total = slots
        self.saved_pages = 0
        """Pages copied to the host since the start."""
        self.loaded_pages = 0
        """Pages copied back since the start."""
        self.dropped_pages = 0
        """Pages given up for others since the start."""
        self._forget = forget
        self._free = list(range(slots - 1, -1, -1))
        self._host_only: OrderedDict[Node, None] = OrderedDict()
        """Nodes that only the host holds, in the order in which they left the device: children before their parents."""
        self._on_both: OrderedDict[Node, None] = OrderedDict()
        """Nodes on the device as well: their slots are to be had for nothing."""
        self._loading: list[Node] = []
        """Of those, the ones that the next plan loads: their slots must not be saved into before."""
        self._saves: dict[int, int] = {}
        """Page by slot, for the next plan. A slot that changes hands again before that is saved once."""
        self._loads: list[Copy] = []

    def report(self, cached_tokens: int) -> HostLoad:
        """Its state, for `Load`."""
        used = self.total - len(self._free)
        return HostLoad(self.total, used, self.saved_pages, self.loaded_pages, self.dropped_pages, cached_tokens)

    def offload(self, node: Node, page: int) -> bool:
        """`node` is leaving `page`: its KV stays here. False where there is no slot for it, which happens to leaves alone."""
        if node.slot < 0:
            slot = self._take_slot()
            if slot < 0:
                return False
            node.slot = slot
            self._saves[slot] = page
            self.saved_pages += 1
        else:
            del self._on_both[node]
        self._host_only[node] = None
        return True

    def pin(self, nodes: Sequence[Node]) -> None:
        """These are to come back, or have: whoever needs a slot from now on, theirs is not given up."""
        for node in nodes:
            del self._host_only[node]

    def load(self, nodes: Sequence[Node], pages: Sequence[int]) -> None:
        """The claimed `nodes` are in `pages` of the device again, as soon as the next plan is run."""
        for node, page in zip(nodes, pages, strict=True):
            node.page = page
            self._loads.append((page, node.slot))
        self._loading += nodes
        self.loaded_pages += len(nodes)

    def mark_recomputed(self, node: Node) -> None:
        """A request has computed what only the host held, and published its own page for it."""
        self.pin((node,))
        self._on_both[node] = None

    def take_copies(self) -> tuple[list[Copy], list[Copy]]:
        """Saves and loads since the last call, for the plan that is being made."""
        saves, loads = [(page, slot) for slot, page in self._saves.items()], self._loads
        self._saves, self._loads = {}, []
        for node in self._loading:
            self._on_both[node] = None
        self._loading.clear()
        return saves, loads

    def _take_slot(self) -> int:
        """A slot for a page that leaves the device; -1: there is none, as this plan loads from all of them."""
        if self._free:
            return self._free.pop()
        if self._on_both:
            node, _ = self._on_both.popitem(last=False)
            slot, node.slot = node.slot, -1
        elif self._host_only:
            node, _ = self._host_only.popitem(last=False)
            slot, node.slot = node.slot, -1
            self._forget(node)
            self.dropped_pages += 1
        else:
            return -1
        return slot

"""The host tier: evicted KV in a bounded pool of slots in host memory (as SGLang's HiCache).

The tier is write-back: a page is copied out when it is evicted. So it costs nothing until the device is full, and the two tiers together
hold more because they hold different pages. Published pages never change. A page that came back keeps its slot until another page needs
it, and then its next eviction needs no copy.

Bookkeeping only: the runner executes the copies of a plan: all saves, then all loads, then the forward pass.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from fairlead_worker.cache.node import Node
from fairlead_worker.ipc.messages import HostLoad

Copy = tuple[int, int]
"""(device page, host slot)."""


class HostSlots:
    """Slots 0 .. total - 1 of a host tier, and the copies that the next plan executes."""

    __slots__ = ("_free", "_loads", "_saves", "dropped_pages", "loaded_pages", "saved_pages", "total")

    def __init__(self, slots: int) -> None:
        """Raises ValueError for fewer than one slot."""
        if slots < 1:
            raise ValueError(f"the host tier needs at least one slot, not {slots}")
        self.total = slots
        self.saved_pages = 0
        """Pages copied to the host since the start."""
        self.loaded_pages = 0
        """Pages copied back since the start."""
        self.dropped_pages = 0
        """Pages dropped for other pages since the start."""
        self._free = list(range(slots - 1, -1, -1))
        self._saves: dict[int, int] = {}
        """Slot -> page, for the next plan. A slot that is reassigned before the plan is saved once."""
        self._loads: list[Copy] = []

    def report(self, cached_tokens: int, units: int) -> HostLoad:
        """Return the state of the tier, for `Load`, in whole pages of `units` slots."""
        used = -(-(self.total - len(self._free)) // units)
        saved, loaded, dropped = (count // units for count in (self.saved_pages, self.loaded_pages, self.dropped_pages))
        return HostLoad(self.total // units, used, saved, loaded, dropped, cached_tokens)

    def take_copies(self) -> tuple[list[Copy], list[Copy]]:
        """Return the saves and loads since the last call, for the current plan."""
        saves, loads = [(page, slot) for slot, page in self._saves.items()], self._loads
        self._saves, self._loads = {}, []
        return saves, loads


class HostTier(HostSlots):
    """The slots of a model whose pages hold all layers: each is free or held by the one node whose `slot` it is.

    Nodes with a slot are on the device too, or only on the host. Host-only nodes are dropped in the order in which they left the device.
    A page leaves the device after all its descendants, and gets no new ones until it is back. So the first node in that order is always a
    leaf, and the content of both tiers together stays prefix-closed.
    """

    __slots__ = ("_forget", "_host_only", "_loading", "_on_both")

    def __init__(self, slots: int, forget: Callable[[Node], None]) -> None:
        """`forget` removes a node that is in neither tier from the tree. Raises ValueError for fewer than one slot."""
        super().__init__(slots)
        self._forget = forget
        self._host_only: OrderedDict[Node, None] = OrderedDict()
        """Nodes only on the host, in the order in which they left the device: children before parents."""
        self._on_both: OrderedDict[Node, None] = OrderedDict()
        """Nodes on the device too: their slots can be reused without a loss."""
        self._loading: list[Node] = []
        """Nodes that the next plan loads: their slots must not be overwritten before."""

    def offload(self, node: Node, page: int) -> bool:
        """Keep the KV of a `node` that leaves `page`. Return False if there is no slot, which happens only to leaves."""
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
        """Protect the slots of nodes that are loaded or recomputed from reuse."""
        for node in nodes:
            del self._host_only[node]

    def load(self, nodes: Sequence[Node], pages: Sequence[int]) -> None:
        """Place the pinned `nodes` in device `pages`. Their KV is there once the next plan has run."""
        for node, page in zip(nodes, pages, strict=True):
            node.page = page
            self._loads.append((page, node.slot))
        self._loading += nodes
        self.loaded_pages += len(nodes)

    def mark_recomputed(self, node: Node) -> None:
        """Record that a request computed and published a page that only the host had."""
        self.pin((node,))
        self._on_both[node] = None

    def take_copies(self) -> tuple[list[Copy], list[Copy]]:
        for node in self._loading:
            self._on_both[node] = None
        self._loading.clear()
        return super().take_copies()

    def clear(self) -> int:
        """Drop every page that the next plan does not load. Return how many were only here."""
        count = len(self._host_only)
        while self._host_only:
            node, _ = self._host_only.popitem(last=False)
            self._release(node)
            self._forget(node)
        for node in self._on_both:
            self._release(node)
        self._on_both.clear()
        self.dropped_pages += count
        return count

    def _release(self, node: Node) -> None:
        self._free.append(node.slot)
        node.slot = -1

    def _take_slot(self) -> int:
        """Return a slot for a page that leaves the device; -1: the plan loads from every slot."""
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

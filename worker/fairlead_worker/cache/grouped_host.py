"""The host tier of a cache by groups: a slot holds a page of any group, and window pages leave the device apart from the others.

A node's window pages are on the device, on the host, on both, or lost; so is its page of the group that keeps all tokens, which is not
lost before the node is forgotten. A node is resumable wherever its window pages are. As on the device, a node that no window page needs
is forgotten, so only window pages are dropped for want of slots: the other pages follow them.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from fairlead_worker.cache.grouped import GroupedPrefixCache
from fairlead_worker.cache.grouped_lease import GroupedLease
from fairlead_worker.cache.groups import CacheGroups
from fairlead_worker.cache.host import HostSlots
from fairlead_worker.cache.node import Node
from fairlead_worker.cache.pages import OutOfPages, PagePool
from fairlead_worker.cache.prefix import ExtendHash, Lease

Part = tuple[Node, bool]
"""A node's window pages, or (False) its page of the group that keeps all tokens."""


class GroupedHostTier(HostSlots):
    """The slots: each is free, held by the node whose `slot` it is, or one of `windows`."""

    __slots__ = ("_forget", "_host_only", "_loading", "_on_both", "windows")

    def __init__(self, slots: int, forget: Callable[[Node], None]) -> None:
        """`forget` is called for a node whose window pages are dropped. Raises ValueError for fewer than one slot."""
        super().__init__(slots)
        self._forget = forget
        self.windows: dict[Node, Sequence[int]] = {}
        """Slots of window pages."""
        self._host_only: OrderedDict[Node, None] = OrderedDict()
        """Nodes whose window pages are only on the host, in the order in which they left the device."""
        self._on_both: OrderedDict[Part, None] = OrderedDict()
        """What is on the device too: its slots can be reused without a loss."""
        self._loading: list[Part] = []
        """What the next plan loads: its slots must not be overwritten before."""

    def save_window(self, node: Node, pages: Sequence[int]) -> bool:
        """Keep window pages that leave the device. Return False if there are too few slots."""
        if node in self.windows:
            del self._on_both[node, True]
        else:
            slots = self._save(pages)
            if not slots:
                return False
            self.windows[node] = slots
        self._host_only[node] = None
        return True

    def save_page(self, node: Node) -> bool:
        """Keep `node.page`, which leaves the device. Return False if there is no slot."""
        if node.slot >= 0:
            del self._on_both[node, False]
        elif slots := self._save((node.page,)):
            (node.slot,) = slots
        return node.slot >= 0

    def load(self, part: Part, pages: Sequence[int]) -> None:
        """Place `part` in device `pages`. Its KV is there once the next plan has run."""
        self._loads += zip(pages, self._slots_of(part), strict=True)
        self.loaded_pages += len(pages)
        self._loading.append(part)

    def pin(self, node: Node) -> None:
        """Protect the slots of window pages that are loaded or were computed again."""
        del self._host_only[node]

    def mark_recomputed(self, part: Part) -> None:
        """Record that a request computed and published pages that only the host had."""
        self._on_both[part] = None

    def release_page(self, node: Node) -> None:
        """Free the slot, if it has one, of a node that is forgotten."""
        if node.slot >= 0:
            self._on_both.pop((node, False), None)
            self._release((node, False))

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        self._on_both.update(dict.fromkeys(self._loading))
        self._loading.clear()
        return super().take_copies()

    def clear(self) -> int:
        """Drop every page that the next plan does not load. Return how many were only here."""
        before = self.dropped_pages
        while self._host_only:
            self._drop()
        while self._on_both:
            self._release(self._on_both.popitem(last=False)[0])
        return self.dropped_pages - before

    def _slots_of(self, part: Part) -> Sequence[int]:
        node, is_window = part
        return self.windows[node] if is_window else (node.slot,)

    def _release(self, part: Part) -> None:
        node, is_window = part
        self._free += self._slots_of(part)
        if is_window:
            del self.windows[node]
        else:
            node.slot = -1

    def _drop(self) -> None:
        """Drop the window pages that left the device first, and what only they needed."""
        free, (node, _) = len(self._free), self._host_only.popitem(last=False)
        self._release((node, True))
        self._forget(node)
        self.dropped_pages += len(self._free) - free

    def _save(self, pages: Sequence[int]) -> Sequence[int]:
        """Return a slot for each of `pages`, which the next plan saves; none if the plan loads from too many slots."""
        count = len(pages)
        while len(self._free) < count:
            if self._on_both:
                self._release(self._on_both.popitem(last=False)[0])
            elif self._host_only:
                self._drop()
            else:
                return ()
        slots = self._free[-count:]
        del self._free[-count:]
        self._saves.update(zip(slots, pages, strict=True))
        self.saved_pages += count
        return slots


class TieredGroupedCache(GroupedPrefixCache):
    """A `GroupedPrefixCache` with a host tier. Unlike there, an unused leaf of the nodes on the device has its window pages there."""

    def __init__(
        self, pool: PagePool, block_tokens: int, extend_hash: ExtendHash, groups: CacheGroups, chunk_tokens: int, host_slots: int
    ) -> None:
        """Raises ValueError for a bad block size, and for fewer than one slot."""
        super().__init__(pool, block_tokens, extend_hash, groups, chunk_tokens)
        self.host = self._slots = GroupedHostTier(host_slots, self._on_dropped)

    # Leases

    def attach(self, node: Node) -> Lease:
        """Return a lease that shares the pages down to `node`. Raises OutOfPages if pages on the host do not fit on the device."""
        loaded = self._load(node)
        lease = super().attach(node)
        if loaded:
            lease.loaded = loaded
            node.lock_ref -= 1
        return lease

    def _load(self, node: Node) -> int:
        """Load what a request that continues after `node` needs. Return how many nodes it concerns; if any, `node` stays locked."""
        window = [*self._window_of(node)]
        absent, absent_windows = list[Node](), [each for each in window if not self._pages[each].pages]
        step = node
        while step.page < 0 and step.parent is not None:
            absent.append(step)
            step = step.parent
        if not absent and not absent_windows:
            return 0
        full, windowed = self.groups.full, self.groups.windowed
        unused = [each for each in window if not self._pages[each].leases]
        count = self.unused_above(node) * full + len(unused) * windowed
        if count > self.pool.free + self.evictable:
            raise OutOfPages(f"{count} pages to load from the host or to use again, {self.pool.free + self.evictable} available")
        self._lock(node)
        self._num_nodes += len(absent)
        for each in unused:  # nor are these evicted for what is loaded
            (self._ends if each in self._ends else self._idle).pop(each, None)
        for each in absent_windows:
            self._slots.pin(each)
        pages = self._take(len(absent) * full + len(absent_windows) * windowed)
        self.pool.move_to_cache(len(pages))
        for each in reversed(absent):
            assert each.parent is not None
            each.page = pages.pop()
            each.parent.device_children += 1
            self._slots.load((each, False), (each.page,))
        for each in absent_windows:
            taken = self._pages[each].pages = tuple(pages.pop() for _ in range(windowed))
            self._slots.load((each, True), taken)
        self._idle.update(dict.fromkeys(unused))
        return len({*absent, *absent_windows})

    def _attach_computed(self, node: Node, parent: Node, page: int) -> None:
        self._slots.mark_recomputed((node, False))
        node.page = page
        parent.device_children += 1
        self._num_nodes += 1
        self.pool.move_to_cache(1)

    def _share_window(self, lease: GroupedLease, index: int, node: Node) -> None:
        page = self._pages.get(node)
        if index < lease.first or page is None or page.pages:
            super()._share_window(lease, index, node)
            return
        page.pages, page.leases = tuple(table[index] for table in lease.windows), 1
        self._slots.pin(node)
        self._slots.mark_recomputed((node, True))
        self.pool.move_to_cache(len(page.pages))
        lease.held.append(node)

    def clear(self) -> int:
        """Drop all cached pages that no request uses, in both tiers. Return their number, as whole pages rounded up."""
        dropped, count = self._slots.clear(), self.evictable
        self._evict(count, offload=False)
        return -(-(dropped + count) // self.units)

    # Inside

    def _offload(self, node: Node) -> bool:
        page = self._pages[node]
        if not self._slots.save_window(node, page.pages):
            return False
        page.pages = ()
        return True

    def _on_dropped(self, node: Node) -> None:
        """Forget window pages that are in no tier any more."""
        self._lose_window(node)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Move `node`, and its ancestors, to the host while they are unused leaves on the device without window pages there, and forget
        those that are needed no more.
        """
        while node.parent is not None and not node.lock_ref and not node.device_children and not self._has_window(node):
            parent = node.parent
            if self._is_needed(node):
                if node.page < 0 or not self.groups.full:
                    return
                node.lock_ref = 1  # what the host drops for it may be all that needs it
                is_saved = self._slots.save_page(node)
                node.lock_ref = 0
                assert is_saved or not self._is_needed(node), "window pages below it can be dropped"
            if node.page >= 0:
                self._free_page(node, parent)
            if not self._is_needed(node):
                self._slots.release_page(node)
                del parent.children[node.key]
            node = parent
        if node.parent is None:
            self._drop_if_empty(node)

    def _has_window(self, node: Node) -> bool:
        """Return whether the device has the node's window pages."""
        page = self._pages.get(node)
        return page is not None and bool(page.pages)

    def _is_needed(self, node: Node) -> bool:
        return bool(node.children) or node in self._pages

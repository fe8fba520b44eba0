"""The radix prefix cache: which prefixes are in which pages, who uses them, and which page goes next.

One node is one page, keyed by its tokens under its parent; each root number (model, adapter, tenant salt) has a tree of its own, so
different roots share nothing. The idea is SGLang's RadixAttention; leaf-first eviction makes what is held prefix-closed, which the
index relies on.
"""

from array import array
from collections.abc import Callable, Iterator

from fairlead_worker.cache.events import EventLog
from fairlead_worker.cache.host import HostTier
from fairlead_worker.cache.match import PrefixMatches
from fairlead_worker.cache.node import LeafQueue, Node, PrefixMatch
from fairlead_worker.cache.pages import KvLease, OutOfPages, PagePool
from fairlead_worker.messages import CacheEvent

ExtendHash = Callable[[int, "array[int]"], int]
"""`fairlead_index.hashing.extend`: the hash of one block of tokens under its parent's."""

Lease = KvLease[Node]


class PrefixCache:
    """All pages of a worker: a pool, the trees of cached prefixes over it, and leases that share them.

    Counters are O(1). Cached pages that no lease needs are `evictable`; `available` is what a request could get now.

    With a host tier, an evicted page lives on in a slot there. The tree holds what either tier does, and so do matches and events: a page
    in the host tier is a hit like any other, whose KV is copied back into a page of the device when a lease attaches to it.
    """

    def __init__(self, pool: PagePool, block_tokens: int, extend_hash: ExtendHash, host_slots: int = 0) -> None:
        """`host_slots`: pages that the host tier holds at most; 0: there is none."""
        if block_tokens < 1 or block_tokens % pool.page_size:
            raise ValueError(f"block tokens must be a multiple of the page size {pool.page_size}, not {block_tokens}")
        self.pool = pool
        self.page_size = pool.page_size
        self.evicted_pages = 0
        """Pages evicted from the device since the start."""
        self.host = HostTier(host_slots, self._forget) if host_slots else None
        self.block_tokens = block_tokens
        self._block_pages = block_tokens // pool.page_size
        self._extend_hash = extend_hash
        self._roots: dict[int, Node] = {}
        self._adapter_roots: dict[int, Node] = {}
        """The same of requests with LoRA adapters: theirs even should a request without one come with an adapter's root."""
        self._leaves = LeafQueue()
        self._matches = PrefixMatches(pool.page_size)
        self._events = EventLog()
        self._num_locked = 0
        self._time = 0

    # Counters

    @property
    def evictable(self) -> int:
        return self.pool.cached - self._num_locked

    @property
    def available(self) -> int:
        """Pages that could be had now: free or evictable."""
        return self.pool.free + self.evictable

    # Matching

    def track(self, root: int, tokens: "array[int]", reusable: int | None = None, adapted: bool = False) -> PrefixMatch:
        """Starts to follow how much of `tokens` is cached, and of no more than the first `reusable`; ends with `untrack`.

        `adapted`: for a request with a LoRA adapter.
        """
        roots = self._adapter_roots if adapted else self._roots
        node = roots.get(root)
        if node is None:
            node = roots[root] = Node(None, b"", -1, root)
        node.lock_ref += 1
        return self._matches.add(node, tokens, len(tokens) if reusable is None else reusable)

    def untrack(self, match: PrefixMatch) -> None:
        if not match.is_removed:
            self._matches.remove(match)
            match.root.lock_ref -= 1
            self._drop_if_empty(match.root)

    def match(self, match: PrefixMatch) -> Node:
        """The deepest cached page of a watched prompt, exact now. Never the whole prompt: one token is left to compute."""
        self._matches.update(match)
        return match.node

    def refresh(self, limit: int) -> Iterator[PrefixMatch]:
        """Brings up to `limit` watches up to date that changes have touched, and names them."""
        return self._matches.refresh(limit)

    def unused_above(self, node: Node) -> int:
        """Unused pages from the root to `node`, evictable or only on the host: attaching there takes so many out of `available`."""
        count = 0
        while node.lock_ref == 0 and node.parent is not None:
            node, count = node.parent, count + 1
        return count

    # Leases

    def attach(self, node: Node) -> Lease:
        """A lease that shares the pages down to `node`. Raises OutOfPages where some are on the host and find no room on the device."""
        loaded = 0
        if node.page < 0 and node.parent is not None:
            loaded = self._load_from_host(node)
        else:
            self._lock(node)
        pages = array("i", bytes(4 * node.depth))
        step: Node = node
        while step.parent is not None:
            pages[step.depth - 1] = step.page
            step.hits += 1
            step = step.parent
        return KvLease(self.pool, self, node, pages, loaded)

    def grow(self, lease: Lease, tokens: int) -> None:
        """Makes the lease cover `tokens` tokens, evicting cached pages if it must. Raises OutOfPages, and takes nothing then."""
        missing = -(-tokens // self.page_size) - len(lease.pages)
        if missing > 0:
            if missing > self.pool.free:
                self._evict(missing - self.pool.free)
            lease.extend(self.pool.take(missing))

    def grow_each(self, leases: list[Lease]) -> None:
        """One page more for each of these leases. Raises OutOfPages, and takes nothing then."""
        if len(leases) > self.pool.free:
            self._evict(len(leases) - self.pool.free)
        for lease, page in zip(leases, self.pool.take(len(leases)), strict=True):
            lease.pages.append(page)

    def publish(self, lease: Lease, tokens: "array[int]", computed: int) -> None:
        """Gives the pages that `tokens[:computed]` fill to the cache; the lease goes on sharing them.

        Where a page with the same prefix is on the device already, the lease changes over to it and its own becomes free.
        """
        first, last, size = lease.shared, computed // self.page_size, self.page_size
        if last <= first:
            return
        node, pages = lease.place, lease.pages
        raw, width = tokens[first * size : last * size].tobytes(), 4 * size
        index = first
        while index < last and (child := node.children.get(raw[(index - first) * width : (index - first + 1) * width])) is not None:
            if child.page < 0:
                self._attach_computed(child, node, pages[index])
            else:
                lease.use_cached(index, child.page)
            node, index = child, index + 1
        if index > first:
            self._lock(node)
            lease.move_to(node, index)
        if index < last:
            self._insert(lease, tokens, raw[(index - first) * width :], last)

    def insert_pending(self, lease: Lease, tokens: "array[int]", computed: int) -> None:
        """As `publish`, of pages that the step being planned fills: others in it may attach to them, as a step stores the KV of all
        its rows before any of them attends. The lease must hold until that step is over: nothing else keeps pages
        that are not filled yet.

        Nothing where the first of them is cached already: the lease goes on writing into its own.
        """
        first, last, size = lease.shared, computed // self.page_size, self.page_size
        if last <= first:
            return
        raw = tokens[first * size : last * size].tobytes()
        if raw[: 4 * size] not in lease.place.children:
            self._insert(lease, tokens, raw, last)

    def exclusive_pages(self, lease: Lease) -> int:
        """Pages that nobody else uses: what releasing the lease would make available, and might have to be computed again."""
        count, node = len(lease.pages) - lease.shared, lease.place
        while node.lock_ref == 1 and node.parent is not None:
            node, count = node.parent, count + 1
        return count

    # Events

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """Blocks stored and removed since the last call."""
        return self._events.drain()

    def block_hashes(self) -> "array[int]":
        """Hashes of all blocks held, parents first: the snapshot for an index that must start afresh."""
        return array("Q", (node.chain for node in self.nodes() if not node.depth % self._block_pages))

    def roots(self) -> Iterator[Node]:
        """The tree of each root number; their `chain` is that number."""
        return iter(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """Every cached page, parents before children."""
        pending = [*self._roots.values(), *self._adapter_roots.values()]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            if node.cached:
                yield node

    # Inside

    def _insert(self, lease: Lease, tokens: "array[int]", raw: bytes, last: int) -> None:
        """The lease's next pages up to the `last` one, with the tokens in `raw`, are new in the tree.

        The lease moves down to the last of them, and each page above is held by the one below it: no lock changes.
        """
        first, parent, pages, width = lease.shared, lease.place, lease.pages, 4 * self.page_size
        self._num_locked += last - first
        self.pool.move_to_cache(last - first)
        for index in range(first, last):
            key, chain = raw[(index - first) * width : (index - first + 1) * width], parent.chain
            node = parent.children[key] = Node(parent, key, pages[index], chain)
            node.lock_ref = 1
            parent.device_children += 1
            if not node.depth % self._block_pages:
                end = node.depth * self.page_size
                node.chain = self._extend_hash(chain, tokens[end - self.block_tokens : end])
                self._events.add_stored(node.chain, chain)
            if parent.trackers is not None:
                self._matches.on_published(parent, key)
            parent = node
        lease.extend_shared(parent, last)

    def _attach_computed(self, node: Node, parent: Node, page: int) -> None:
        """A page was computed and published for `node`, which only the host tier held."""
        assert self.host is not None, "without a host tier, what is cached is on the device"
        self.host.mark_recomputed(node)
        node.page = page
        parent.device_children += 1
        self.pool.move_to_cache(1)

    def _lock(self, node: Node) -> None:
        """Keeps `node` and all above it. Stops at the first node in use: what is above that one is kept by it."""
        step: Node | None = node
        while step is not None:
            step.lock_ref += 1
            if step.lock_ref > 1 or step.parent is None:
                return
            self._num_locked += 1
            step = step.parent

    def unlock(self, place: Node) -> None:
        """Undoes one lock. Pages that lose their last user are evictable from now on, the deepest first."""
        self._time += 1
        node: Node | None = place
        while node is not None:
            node.lock_ref -= 1
            if node.lock_ref:
                return
            if node.parent is None:
                self._drop_if_empty(node)
                return
            node.last_access = self._time
            self._num_locked -= 1
            if not node.device_children:
                self._leaves.offer(node)
            node = node.parent

    def _evict(self, count: int) -> None:
        """Takes `count` (1 or more) pages off the device; they stay in the tree where the host tier takes them."""
        if count > self.evictable:
            raise OutOfPages(f"{count} pages to evict, {self.evictable} evictable of {self.pool.cached} cached")
        pages: list[int] = []
        node = self._leaves.pop()
        for left in range(count - 1, -1, -1):
            assert node is not None and node.parent is not None, "evictable pages without an unused leaf"
            parent, page = node.parent, node.page
            pages.append(page)
            node.page = -1
            parent.device_children -= 1
            if self.host is None or not self.host.offload(node, page):
                self._forget(node)
            bare = not parent.device_children and not parent.lock_ref and parent.parent is not None
            if left:
                node = self._leaves.next(parent) if bare else self._leaves.pop()
            elif bare:
                self._leaves.offer(parent)
        self.pool.free_cached(pages)
        self.evicted_pages += count

    def _forget(self, node: Node) -> None:
        """Takes a leaf that is in neither tier any more out of the tree."""
        parent = node.parent
        assert parent is not None and not node.children, "leaves go first"
        del parent.children[node.key]
        if not node.depth % self._block_pages:
            self._events.add_removed(node.chain)
        if node.trackers is not None:
            self._matches.on_evicted(node)
        if parent.parent is None:
            self._drop_if_empty(parent)

    def _load_from_host(self, node: Node) -> int:
        """Locks `node` and gives it and all above it pages of the device again; how many had none. Their KV comes with the next plan."""
        assert self.host is not None, "without a host tier, what is cached is on the device"
        absent = []
        while node.page < 0 and node.parent is not None:
            absent.append(node)
            node = node.parent
        absent.reverse()
        count = len(absent)
        if count + self.unused_above(node) > self.available:
            raise OutOfPages(f"{count} pages to bring back from the host, {self.available} available")
        self._lock(node)
        self.host.pin(absent)
        if count > self.pool.free:
            self._evict(count - self.pool.free)
        self.host.load(absent, self.pool.take(count))
        self.pool.move_to_cache(count)
        for each in absent:
            assert each.parent is not None
            each.parent.device_children += 1
        self._lock(absent[-1])
        self.unlock(node)
        return count

    def _drop_if_empty(self, root: Node) -> None:
        """A tree that holds nothing and that nobody watches is forgotten: salts come and go, memory stays flat."""
        if not root.lock_ref and not root.children:
            roots = self._roots if self._roots.get(root.chain) is root else self._adapter_roots
            del roots[root.chain]

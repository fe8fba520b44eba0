"""The radix prefix cache: which prefixes are in which pages, which leases use them, and which page is evicted next.

One node is one page, keyed by its tokens under its parent. Each root number (model, adapter, tenant salt) has its own tree, so different
roots share nothing. The idea is SGLang's RadixAttention. Leaf-first eviction keeps the content prefix-closed, which the index relies on.
"""

from array import array
from collections.abc import Callable, Iterator

from fairlead_worker.cache.events import EventLog
from fairlead_worker.cache.host import HostSlots, HostTier
from fairlead_worker.cache.match import PrefixMatches
from fairlead_worker.cache.node import LeafQueue, Node, PrefixMatch
from fairlead_worker.cache.pages import KvLease, OutOfPages, PagePool
from fairlead_worker.ipc.messages import CacheEvent

ExtendHash = Callable[[int, "array[int]"], int]
"""`fairlead_index.hashing.extend`: the hash of one block of tokens under its parent's."""

Lease = KvLease[Node]


class PrefixCache:
    """All pages of a worker: a pool, the trees of cached prefixes over it, and leases that share them.

    Counters are O(1). Cached pages that no lease needs are `evictable`. `available` is the number of pages that a request could get now.

    With a host tier, an evicted page moves to a slot there. The tree, matches and events cover both tiers. A page in the host tier is a
    hit like any other: its KV is copied back to a device page when a lease attaches to it.
    """

    def __init__(self, pool: PagePool, block_tokens: int, extend_hash: ExtendHash, host_slots: int = 0) -> None:
        """`host_slots`: most pages in the host tier; 0: no host tier. Raises ValueError for a bad block size."""
        if block_tokens < 1 or block_tokens % pool.page_size:
            raise ValueError(f"block tokens must be a multiple of the page size {pool.page_size}, not {block_tokens}")
        self.pool = pool
        self.page_size = pool.page_size
        self.evicted_pages = 0
        """Pages evicted from the device since the start."""
        self._tier = HostTier(host_slots, self._forget) if host_slots else None
        self.host: HostSlots | None = self._tier
        self.block_tokens = block_tokens
        self._block_pages = block_tokens // pool.page_size
        self._extend_hash = extend_hash
        self._roots: dict[int, Node] = {}
        self._adapter_roots: dict[int, Node] = {}
        """The roots of requests with LoRA adapters. They stay apart even if a request without one has an adapter's root number."""
        self._leaves = LeafQueue()
        self._matches = PrefixMatches(pool.page_size)
        self._events = EventLog()
        self._num_locked = 0
        self._time = 0
        self.units = 1
        """Pages of the pool that hold all layers of `page_size` tokens: more than one where layers are in groups (`cache/grouped.py`)."""
        self.longest = pool.total
        """Pages of the longest request that can run."""

    # Counters

    @property
    def evictable(self) -> int:
        return self.pool.cached - self._num_locked

    @property
    def available(self) -> int:
        """Pages that a request could get now: free or evictable."""
        return self.pool.free + self.evictable

    # Matching

    def track(self, root: int, tokens: "array[int]", reusable: int | None = None, adapted: bool = False) -> PrefixMatch:
        """Start tracking how much of `tokens` is cached, at most the first `reusable`. End it with `untrack`.

        `adapted`: for a request with a LoRA adapter.
        """
        roots = self._adapter_roots if adapted else self._roots
        node = roots.get(root)
        if node is None:
            node = roots[root] = Node(None, b"", -1, root)
        node.lock_ref += 1
        return self._matches.add(node, tokens, len(tokens) if reusable is None else reusable)

    def untrack(self, match: PrefixMatch) -> None:
        """Stop tracking a prompt. A second call does nothing."""
        if not match.is_removed:
            self._matches.remove(match)
            match.root.lock_ref -= 1
            self._drop_if_empty(match.root)

    def match(self, match: PrefixMatch) -> Node:
        """Return the deepest cached node of a tracked prompt, up to date. At least one token is left to compute."""
        self._matches.update(match)
        return match.node

    def refresh(self, limit: int) -> Iterator[PrefixMatch]:
        """Update up to `limit` stale matches and yield them."""
        return self._matches.refresh(limit)

    def unused_above(self, node: Node) -> int:
        """Return the unused pages from the root to `node`. Attaching there lowers `available` by that number."""
        count = 0
        while node.lock_ref == 0 and node.parent is not None:
            node, count = node.parent, count + 1
        return count

    # Leases

    def attach(self, node: Node) -> Lease:
        """Return a lease that shares the pages down to `node`. Raises OutOfPages if pages on the host do not fit on the device."""
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
        """Extend the lease to `tokens` tokens, and evict cached pages if needed. Raises OutOfPages and then takes nothing."""
        missing = -(-tokens // self.page_size) - len(lease.pages)
        if missing > 0:
            if missing > self.pool.free:
                self._evict(missing - self.pool.free)
            lease.extend(self.pool.take(missing))

    def grow_each(self, leases: "list[Lease]") -> None:
        """Extend each lease by one page. Raises OutOfPages and then takes nothing."""
        if len(leases) > self.pool.free:
            self._evict(len(leases) - self.pool.free)
        for lease, page in zip(leases, self.pool.take(len(leases)), strict=True):
            lease.pages.append(page)

    def take_drafts(self, lease: Lease, count: int) -> int:
        """Return for how many of `count` drafted tokens of a row there is room beside their pages."""
        return count

    def publish(self, lease: Lease, tokens: "array[int]", computed: int) -> None:
        """Move the pages that `tokens[:computed]` fill to the cache. The lease continues to share them.

        If a page with the same prefix is already on the device, the lease switches to it and its own page becomes free.
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
        """Publish pages that the current step will fill.

        Other rows of the step may attach to them, because each layer stores the KV of all rows before any row attends. The lease must
        hold until the step ends: nothing else protects pages that are not filled yet.

        Do nothing if the first page is cached already: the lease then writes to its own pages.
        """
        first, last, size = lease.shared, computed // self.page_size, self.page_size
        if last <= first:
            return
        raw = tokens[first * size : last * size].tobytes()
        if raw[: 4 * size] not in lease.place.children:
            self._insert(lease, tokens, raw, last)

    def exclusive_pages(self, lease: Lease, attached: Node | None = None) -> int:
        """Return the pages that only this lease uses: a release makes them available, and they may need recomputing.

        `attached`: where another lease attaches next; the pages above it are not counted.
        """
        while attached is not None and not attached.lock_ref:
            attached = attached.parent
        count, node = len(lease.pages) - lease.shared, lease.place
        while node.lock_ref == 1 and node.parent is not None and node is not attached:
            node, count = node.parent, count + 1
        return count

    # Events

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """Return the blocks stored and removed since the last call."""
        return self._events.drain()

    def promise(self, match: PrefixMatch) -> "array[int]":
        """Show the blocks that a waiting request will compute to the index, and return their hashes for `withdraw`."""
        blocks, chain, size = array("Q"), match.root.chain, self.block_tokens
        for start in range(0, match.limit // self._block_pages * size, size):
            chain = self._extend_hash(chain, match.tokens[start : start + size])
            blocks.append(chain)
        self._events.promise(blocks, match.root.chain, self._num_shown(match))
        return blocks

    @property
    def may_promise(self) -> bool:
        """Whether fewer blocks are promised than the device's pages hold. More of them could never be cached together."""
        return len(self._events.promised) * self._block_pages < self.pool.total

    def withdraw(self, blocks: "array[int]", match: PrefixMatch | None) -> None:
        """Undo `promise`. `match`: of a request that ends before its prompt is computed, else None: then all its blocks are cached."""
        self._events.withdraw(blocks, len(blocks) if match is None else self._num_shown(match))

    def block_hashes(self) -> "array[int]":
        """Return the hashes of all cached and promised blocks, parents first: the snapshot for an index that starts empty."""
        cached = array("Q", (node.chain for node in self.nodes() if not node.depth % self._block_pages))
        known = set(cached)
        return cached + array("Q", (block for block in self._events.promised if block not in known))

    def roots(self) -> Iterator[Node]:
        """Iterate over the root nodes, with and without adapter; `chain` is the root number."""
        return iter([*self._roots.values(), *self._adapter_roots.values()])

    def nodes(self) -> Iterator[Node]:
        """Yield every cached page, parents before children."""
        pending = list(self.roots())
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            if node.cached:
                yield node

    def clear(self) -> int:
        """Drop all cached pages that no request uses, in both tiers. Return their number."""
        dropped = self._tier.clear() if self._tier is not None else 0
        count = self.evictable
        if count:
            self._evict(count, offload=False)
        return dropped + count

    # Inside

    def _num_shown(self, match: PrefixMatch) -> int:
        """Return how many blocks of a tracked prompt the index sees because they are cached."""
        return self.match(match).depth // self._block_pages

    def _insert(self, lease: Lease, tokens: "array[int]", raw: bytes, last: int) -> None:
        """Insert the lease's next pages, up to page `last` with the tokens in `raw`, into the tree.

        The lease moves down to the last page. Each page is locked by the page below it, so no lock changes.
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
                self._add_block(node, chain)
            if parent.trackers is not None:
                self._matches.on_published(parent, key)
            parent = node
        lease.extend_shared(parent, last)

    def _attach_computed(self, node: Node, parent: Node, page: int) -> None:
        """Attach a computed page to `node`, which was only in the host tier."""
        assert self._tier is not None, "without a host tier, what is cached is on the device"
        self._tier.mark_recomputed(node)
        node.page = page
        parent.device_children += 1
        self.pool.move_to_cache(1)

    def _lock(self, node: Node) -> None:
        """Lock `node` and its ancestors. Stop at the first locked node, because it locks its own ancestors."""
        step: Node | None = node
        while step is not None:
            step.lock_ref += 1
            if step.lock_ref > 1 or step.parent is None:
                return
            self._num_locked += 1
            step = step.parent

    def unlock(self, place: Node) -> None:
        """Undo one lock. Pages without locks become evictable, the deepest first."""
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

    def _evict(self, count: int, offload: bool = True) -> None:
        """Evict `count` (1 or more) pages from the device. They stay in the tree if the host tier takes them. Raises OutOfPages.

        `offload`: offer them to the host tier.
        """
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
            if self._tier is None or not offload or not self._tier.offload(node, page):
                self._forget(node)
            bare = not parent.device_children and not parent.lock_ref and parent.parent is not None
            if left:
                node = self._leaves.next(parent) if bare else self._leaves.pop()
            elif bare:
                self._leaves.offer(parent)
        self.pool.free_cached(pages)
        self.evicted_pages += count

    def _forget(self, node: Node) -> None:
        """Remove a leaf that is in neither tier from the tree."""
        parent = node.parent
        assert parent is not None and not node.children, "leaves go first"
        del parent.children[node.key]
        self._remove_block(node)
        if node.trackers is not None:
            self._matches.on_evicted(node)
        if parent.parent is None:
            self._drop_if_empty(parent)

    def _add_block(self, node: Node, parent: int) -> None:
        """Show the block that ends at `node`, which is cached now, to the index. `parent`: hash of the block before it."""
        self._events.add_stored(node.chain, parent)

    def _remove_block(self, node: Node) -> None:
        """Hide what the index shows because of `node`, which is cached no longer."""
        if not node.depth % self._block_pages:
            self._events.add_removed(node.chain)

    def _load_from_host(self, node: Node) -> int:
        """Lock `node`, and return how many pages got a device page again. The next plan loads their KV."""
        assert self._tier is not None, "without a host tier, what is cached is on the device"
        absent = []
        while node.page < 0 and node.parent is not None:
            absent.append(node)
            node = node.parent
        absent.reverse()
        count = len(absent)
        if count + self.unused_above(node) > self.available:
            raise OutOfPages(f"{count} pages to load from the host, {self.available} available")
        self._lock(node)
        self._tier.pin(absent)
        if count > self.pool.free:
            self._evict(count - self.pool.free)
        self._tier.load(absent, self.pool.take(count))
        self.pool.move_to_cache(count)
        for each in absent:
            assert each.parent is not None
            each.parent.device_children += 1
        self._lock(absent[-1])
        self.unlock(node)
        return count

    def _drop_if_empty(self, root: Node) -> None:
        """Drop a tree without pages and matches, so that memory stays flat while tenant salts change."""
        if not root.lock_ref and not root.children:
            roots = self._roots if self._roots.get(root.chain) is root else self._adapter_roots
            del roots[root.chain]

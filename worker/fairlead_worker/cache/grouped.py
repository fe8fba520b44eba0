"""The prefix cache of models with sliding windows: pages in groups, of which those with a window need only the latest pages.

A request has one page table for each group. Its window pages become free, or evictable if they are cached, as soon as they lie behind the
window. So a cached prefix may have holes in its window groups. A request can continue from a page if that page and those that the window
still reaches before it are there: this page is *resumable*. A match is the deepest resumable page. SGLang's tree for such models marks
pages without window KV as tombstones; here each window page counts the pages in a row that end with it, so the test takes no walk.

What the index sees stays prefix-closed: a block is shown while it and all blocks before it are resumable. A deeper resumable page behind a
hole is a hit, and is not shown. See docs/design/engine/cache-groups.md.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from fairlead_worker.cache.grouped_lease import GroupedLease, PageTable
from fairlead_worker.cache.groups import CacheGroups
from fairlead_worker.cache.match import PrefixMatches
from fairlead_worker.cache.node import Node, PrefixMatch
from fairlead_worker.cache.pages import OutOfPages, PagePool
from fairlead_worker.cache.prefix import ExtendHash, Lease, PrefixCache
from fairlead_worker.cache.shown import ShownBlocks

ENDS = 3
"""Most pages in last windows of prefixes for each other one, before the longest unused of them are evicted first."""
UNBOUNDED = 1 << 31
"""Pages of the longest request where no group keeps all tokens."""


@dataclass(slots=True, eq=False)
class WindowPage:
    """The pages of all window groups for one node."""

    pages: tuple[int, ...]
    """One for each window group; empty: only the host tier has them (`cache/grouped_host.py`)."""
    run: int
    """Nodes in a row that have window pages, this one the last; not more than the window reaches."""
    leases: int = 1
    """Leases whose window holds it; 0: evictable."""
    last_access: int = 0
    """When a lease or a prompt that waits last used it or a page below it, in the cache's logical time."""


class GroupedPrefixCache(PrefixCache):
    """A `PrefixCache` whose nodes have a page of the group that keeps all tokens, if there is one, and may have pages of the window groups.

    Pages are counted one by one in the pool. `available` and all numbers that the scheduler compares with it are in *whole* pages: one page
    of each group.

    Eviction takes window pages, the longest unused first, and nodes that no cached page needs any more. Of an unused prefix the pages just
    before its last window go first, then those before them, and its last window goes last. So what the index sees shrinks from its end,
    and a conversation can continue until all of it is evicted. Last windows outlast other pages that were used later, but only while
    they are at most three quarters of the unused pages. So prefixes that prompts share keep a place.
    """

    def __init__(self, pool: PagePool, block_tokens: int, extend_hash: ExtendHash, groups: CacheGroups, chunk_tokens: int) -> None:
        """`chunk_tokens`: of the prompt chunks whose pages an admission waits for; 0: prompts are computed whole.

        Raises ValueError for a bad block size.
        """
        super().__init__(pool, block_tokens, extend_hash)
        self.groups = groups
        self._matches = PrefixMatches(pool.page_size, self.is_resumable)
        self._reach = groups.reach(pool.page_size)
        self._chunk_pages = -(-chunk_tokens // pool.page_size) if chunk_tokens else UNBOUNDED
        self._pages: dict[Node, WindowPage] = {}
        self._idle: OrderedDict[Node, None] = OrderedDict()
        """Nodes whose window pages no lease needs, in the order of their eviction, without those of `_ends`."""
        self._ends: OrderedDict[Node, None] = OrderedDict()
        """Those in the last windows of prefixes."""
        self.shown = ShownBlocks(self._block_pages, self._events, self.is_resumable)
        self._num_nodes = 0
        self.units = groups.count
        self.longest = self._longest()

    # Counters

    @property
    def evictable(self) -> int:
        """Pages, not whole ones, that no lease needs."""
        return (self._num_nodes - self._num_locked) * self.groups.full + (len(self._idle) + len(self._ends)) * self.groups.windowed

    @property
    def available(self) -> int:
        """Whole pages that a request could get now."""
        return (self.pool.free + self.evictable) // self.units

    @property
    def may_promise(self) -> bool:
        return len(self._events.promised) * self._block_pages * self.units < self.pool.total

    def _longest(self) -> int:
        """Return the pages of the longest request that runs alone."""
        full, windowed, total = self.groups.full, self.groups.windowed, self.pool.total
        most = self._window_pages(UNBOUNDED)
        if most * self.units > total:
            return total // self.units
        return (total - most * windowed) // full if full else UNBOUNDED

    def _window_pages(self, pages: int) -> int:
        """Return the most pages that each window group holds at once for a request of `pages` pages."""
        return min(pages, self._reach + 1 + self._chunk_pages)

    # Matching

    def is_resumable(self, node: Node) -> bool:
        """Return whether a request can continue after `node`."""
        if node.parent is None:
            return True
        page = self._pages.get(node)
        return page is not None and page.run >= self._reach_of(node)

    def _reach_of(self, node: Node) -> int:
        """Return the pages down to `node` that a request needs to continue after it."""
        return node.depth - self.groups.first_kept(node.depth * self.page_size) // self.page_size

    def track(self, root: int, tokens: "array[int]", reusable: int | None = None, adapted: bool = False) -> PrefixMatch:
        match = super().track(root, tokens, reusable, adapted)
        self._time += 1
        for node in self._window_of(match.node):  # what a waiting request will use counts as used now
            self._touch(node, self._ends if node in self._ends else self._idle)
        return match

    def shown_tokens(self, node: Node) -> int:
        """Return the tokens down to `node` that the index can know: whole blocks that it sees, and pages after them."""
        return self.shown.depth_of(node) * self.page_size

    def _num_shown(self, match: PrefixMatch) -> int:
        return self.shown.deepest(self.match(match)).depth // self._block_pages

    def shortage(self, tokens: int, output: int, node: Node) -> int:
        """Return how many whole pages are missing to admit a prompt of `tokens` tokens, cached down to `node`; 0 or less: it fits.

        `output`: tokens that its window should have room for too.
        """
        window = sum(not self._pages[step].leases for step in self._window_of(node))
        cost = self._cost(tokens, output, node, window) + self.unused_above(node) * self.groups.full
        return -(-(cost - self.pool.free - self.evictable) // self.units)

    def cost(self, tokens: int, node: Node) -> int:
        """Return the whole pages that a prompt of `tokens` tokens takes, cached down to `node`, rounded up."""
        return -(-self._cost(tokens, 0, node, 0) // self.units)

    def _cost(self, tokens: int, output: int, node: Node, unused: int) -> int:
        """Return the pages that a request takes at once. `unused`: window pages above `node` that it takes first, and gives back later."""
        pages, longest = -(-tokens // self.page_size), -(-(tokens + output) // self.page_size)
        window = min(longest - node.depth + unused, self._window_pages(longest))
        return (pages - node.depth) * self.groups.full + window * self.groups.windowed

    def pages_to_keep(self, pages: int, leases: Iterable[tuple[Lease, int]]) -> int:
        """Return the whole pages for `pages` pages of output. `leases`: of the running requests, each with the pages it may reach.

        A window that is full takes no more pages.
        """
        window = 0
        for lease, reached in leases:
            assert isinstance(lease, GroupedLease)
            window += max(min(reached, self._reach + 1) - lease.window_pages, 0)
        return -(-(pages * self.groups.full + window * self.groups.windowed) // self.units)

    # Leases

    def attach(self, node: Node) -> Lease:
        """Return a lease that shares the pages down to `node`, which is resumable."""
        self._lock(node)
        held = [*self._window_of(node)]
        held.reverse()
        table = PageTable("i", bytes(4 * node.depth))
        table.others = [array("i", bytes(4 * node.depth)) for _ in range(self.units - 1)]
        lease = GroupedLease(self, node, table, node.depth - len(held), held)
        for each in held:
            self._lease_window(lease, each)
        step: Node = node
        while step.parent is not None:
            if self.groups.full:
                table[step.depth - 1] = step.page
            step.hits += 1
            step = step.parent
        return lease

    def reserve(self, lease: Lease, tokens: int) -> None:
        """Extend the group that keeps all tokens to `tokens` tokens. Raises OutOfPages and then takes nothing."""
        if self.groups.full:
            lease.extend(self._take(max(-(-tokens // self.page_size) - len(lease.pages), 0)))

    def grow(self, lease: Lease, tokens: int) -> None:
        """Extend all groups of the lease to `tokens` tokens. Raises OutOfPages and then takes nothing."""
        assert isinstance(lease, GroupedLease)
        missing = [max(-(-tokens // self.page_size) - len(table), 0) for table in lease.tables]
        pages = self._take(sum(missing))
        for table, count in zip(lease.tables, missing, strict=True):
            table.extend(pages[:count])
            del pages[:count]

    def grow_each(self, leases: "list[Lease]") -> None:
        """Extend each lease by one page of each group, after the pages behind its window. Raises OutOfPages and then takes nothing."""
        for lease in leases:
            assert isinstance(lease, GroupedLease)
            self._slide(lease, len(lease.pages) * self.page_size)
        count = self.units
        pages = iter(self._take(count * len(leases)))
        for lease in leases:
            assert isinstance(lease, GroupedLease)
            for table in lease.tables:
                table.append(next(pages))

    def grow_chunk(self, lease: Lease, computed: int, count: int) -> int:
        """Give back what is behind the window of token `computed`, and extend the window groups for a chunk of `count` tokens from there.

        Return how many tokens fit: `count`, or less that ends at a page.
        """
        assert isinstance(lease, GroupedLease)
        self._slide(lease, computed)
        size, begin = self.page_size, len(lease.windows[0])
        room = begin + (self.pool.free + self.evictable) // self.groups.windowed
        count = max(min(count, room * size - computed), 0)
        pages = max(-(-(computed + count) // size) - begin, 0)
        taken = self._take(pages * self.groups.windowed)
        for at, table in enumerate(lease.windows):
            table.extend(taken[at * pages : (at + 1) * pages])
        return count

    def publish(self, lease: Lease, tokens: "array[int]", computed: int) -> None:
        """Move the pages that `tokens[:computed]` fill to the cache. The lease continues to share them.

        Where the cache has a page with the same prefix, the lease switches to it and its own page becomes free. Where it only lacks the
        window pages, it takes those of the lease.
        """
        assert isinstance(lease, GroupedLease)
        if computed // self.page_size > lease.shared:
            self._publish(lease, tokens, computed // self.page_size)
        self._slide(lease, computed)

    def _publish(self, lease: GroupedLease, tokens: "array[int]", last: int) -> None:
        first, size, width = lease.shared, self.page_size, 4 * self.page_size
        node, index = lease.place, first
        raw = tokens[first * size : last * size].tobytes()
        while index < last and (child := node.children.get(raw[(index - first) * width : (index - first + 1) * width])) is not None:
            if child.page < 0:
                self._attach_computed(child, node, lease.pages[index])
            elif self.groups.full:
                lease.use_cached(index, child.page)
            self._share_window(lease, index, child)
            node, index = child, index + 1
        if index > first:
            self._lock(node)
            lease.move_to(node, index)
        if index < last:
            self._insert(lease, tokens, raw[(index - first) * width :], last)

    def is_shown(self, lease: Lease) -> bool:
        """Return whether the index sees all whole blocks that the lease shares."""
        return self.shown.has_block_of(lease.place)

    def exclusive_pages(self, lease: Lease, attached: Node | None = None) -> int:
        """Return the whole pages that a release of this lease makes available, rounded down."""
        assert isinstance(lease, GroupedLease)
        kept = set(self._window_of(attached)) if attached is not None else ()
        window = len(lease.windows[0]) - max(lease.first, lease.shared)
        window += sum(self._pages[node].leases == 1 and node not in kept for node in lease.held)
        return (super().exclusive_pages(lease, attached) * self.groups.full + window * self.groups.windowed) // self.units

    # Events

    def block_hashes(self) -> "array[int]":
        """Return the hashes of all shown and promised blocks, parents first."""
        cached = array("Q", (node.chain for node in self.nodes() if node in self.shown.nodes))
        known = set(cached)
        return cached + array("Q", (block for block in self._events.promised if block not in known))

    def clear(self) -> int:
        """Drop all cached pages that no request uses. Return their number, as whole pages rounded up."""
        count = self.evictable
        self._evict(count)
        return -(-count // self.units)

    # Window pages

    def _window_of(self, node: Node) -> Iterable[Node]:
        """Yield the nodes whose window pages a request needs to continue after `node`, `node` first."""
        for _ in range(self._reach_of(node)):
            yield node
            assert node.parent is not None
            node = node.parent

    def _lease_window(self, lease: GroupedLease, node: Node) -> None:
        """Lease the cached window pages of `node`."""
        page = self._pages[node]
        if not page.leases:
            del (self._ends if node in self._ends else self._idle)[node]
        page.leases += 1
        for table, number in zip(lease.windows, page.pages, strict=True):
            table[node.depth - 1] = number

    def _share_window(self, lease: GroupedLease, index: int, node: Node) -> None:
        """Share the window pages at `index` with `node`, which has the same tokens."""
        if index < lease.first:
            return  # they are behind the window, and given back
        own = tuple(table[index] for table in lease.windows)
        if node in self._pages:
            self._lease_window(lease, node)
            self.pool.give_back(own)
        else:
            self._add_window(node, own)
        lease.held.append(node)

    def _add_window(self, node: Node, pages: tuple[int, ...]) -> None:
        """Move a lease's window pages to `node`."""
        self.pool.move_to_cache(len(pages))
        self._pages[node] = WindowPage(pages, 0)
        pending = [node]
        while pending:  # the row of window pages may continue below
            node = pending.pop()
            assert node.parent is not None
            before, page, was_resumable = self._pages.get(node.parent), self._pages.get(node), self.is_resumable(node)
            run = 1 if before is None else min(before.run + 1, self._reach)
            if page is None or page.run >= run:
                continue
            page.run = run
            pending += node.children.values()
            if not was_resumable and self.is_resumable(node):
                self._on_resumable(node)

    def _slide(self, lease: GroupedLease, computed: int) -> None:
        """Give back the window pages that token `computed` and the one before it, which may be computed again, do not reach."""
        first = self.groups.first_kept(computed) // self.page_size
        while lease.first < first:
            if lease.held:
                self._return_window(lease.held.popleft(), self._idle)
            elif lease.first >= lease.shared:
                self.pool.give_back(table[lease.first] for table in lease.windows)
            lease.first += 1

    def release_window(self, place: Node, held: "deque[Node]") -> None:
        """Return a lease's window pages, and have the prefix down to `place` evicted in the order that the class describes."""
        self._time += 1
        step: Node = place
        while step.parent is not None:
            self._touch(step, self._idle)
            step = step.parent
        while held:
            self._return_window(held.pop(), self._ends)

    def _return_window(self, node: Node, queue: OrderedDict[Node, None]) -> None:
        page = self._pages[node]
        page.leases -= 1
        if not page.leases:
            page.last_access = self._time
            queue[node] = None

    def _touch(self, node: Node, queue: OrderedDict[Node, None]) -> None:
        """Put the window pages of `node`, if it has any that no lease needs, at the end of `queue`."""
        page = self._pages.get(node)
        if page is not None and page.pages and not page.leases:
            page.last_access = self._time
            self._ends.pop(node, None)
            self._idle.pop(node, None)
            queue[node] = None

    def _next_victim(self) -> Node:
        """Remove the node whose window pages are evicted next from its queue, and return it."""
        idle, ends = next(iter(self._idle), None), next(iter(self._ends), None)
        evicts_end = idle is None or (
            ends is not None and len(self._ends) > ENDS * len(self._idle) and self._pages[ends].last_access < self._pages[idle].last_access
        )
        node, _ = (self._ends if evicts_end else self._idle).popitem(last=False)
        return node

    def _on_resumable(self, node: Node) -> None:
        """Show a node that became resumable to matches and the index."""
        step = node
        while (parent := step.parent) is not None:
            self._matches.on_published(parent, step.key)
            if self.is_resumable(parent):
                break
            step = parent
        self.shown.on_resumable(node)

    # Inside

    def _take(self, count: int) -> list[int]:
        if count > self.pool.free:
            self._evict(count - self.pool.free)
        return self.pool.take(count)

    def _insert(self, lease: Lease, tokens: "array[int]", raw: bytes, last: int) -> None:
        assert isinstance(lease, GroupedLease)
        first, parent, width, full = lease.shared, lease.place, 4 * self.page_size, self.groups.full
        self._num_locked += last - first
        self._num_nodes += last - first
        self.pool.move_to_cache((last - first) * full)
        for index in range(first, last):
            key, chain = raw[(index - first) * width : (index - first + 1) * width], parent.chain
            node = parent.children[key] = Node(parent, key, lease.pages[index] if full else 0, chain)
            node.lock_ref = 1
            parent.device_children += 1
            if not node.depth % self._block_pages:
                end = node.depth * self.page_size
                node.chain = self._extend_hash(chain, tokens[end - self.block_tokens : end])
            if index >= lease.first:
                self._add_window(node, tuple(table[index] for table in lease.windows))
                lease.held.append(node)
            parent = node
        lease.extend_shared(parent, last)

    def unlock(self, place: Node) -> None:
        """Undo one lock, and forget the nodes that no cached page needs."""
        node: Node | None = place
        while node is not None:
            node.lock_ref -= 1
            if node.lock_ref:
                return
            if node.parent is None:
                self._drop_if_empty(node)
                return
            self._num_locked -= 1
            parent = node.parent
            self._prune(node)
            node = parent

    def _prune(self, node: Node) -> None:
        """Forget `node`, and its ancestors, while they are unused leaves without window pages."""
        while node.parent is not None and not node.children and not node.lock_ref and node not in self._pages:
            parent = node.parent
            del parent.children[node.key]
            self._free_page(node, parent)
            node = parent
        if node.parent is None:
            self._drop_if_empty(node)

    def _free_page(self, node: Node, parent: Node) -> None:
        """Free the page of the group that keeps all tokens, if there is one."""
        if self.groups.full:
            self.pool.free_cached([node.page])
        node.page = -1
        parent.device_children -= 1
        self._num_nodes -= 1

    def _evict(self, count: int, offload: bool = True) -> None:
        """Evict window pages, and what only they needed, until `count` more pages are free. Raises OutOfPages.

        `offload`: offer them to the host tier, if there is one.
        """
        if count > self.evictable:
            raise OutOfPages(f"{count} pages to evict, {self.evictable} evictable of {self.pool.cached} cached")
        before = self.pool.free
        while self.pool.free < before + count:
            node = self._next_victim()
            pages = self._pages[node].pages
            if not (offload and self._offload(node)):
                self._lose_window(node)
            self.pool.free_cached([*pages])
            self._prune(node)
        self.evicted_pages += self.pool.free - before

    def _offload(self, node: Node) -> bool:
        """Move the window pages of `node` to the host tier. Return False if it does not take them."""
        return False

    def _lose_window(self, node: Node) -> None:
        """Forget the window pages of `node`."""
        was_resumable = self.is_resumable(node)
        del self._pages[node]
        if was_resumable:
            self._on_lost(node)
        self._break(node)

    def _break(self, node: Node) -> None:
        """Shorten the rows of window pages below `node`, which has lost its own."""
        pending = [(child, 1) for child in node.children.values()]
        while pending:
            node, run = pending.pop()
            page = self._pages.get(node)
            if page is None or page.run <= run:
                continue
            was_resumable = self.is_resumable(node)
            page.run = run
            if was_resumable and not self.is_resumable(node):
                self._on_lost(node)
            pending += ((child, run + 1) for child in node.children.values())

    def _on_lost(self, node: Node) -> None:
        """Tell matches and the index that `node` is not resumable any more."""
        self._matches.on_evicted(node)
        self.shown.on_lost(node)

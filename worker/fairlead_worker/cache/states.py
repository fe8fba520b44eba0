"""The prefix cache of models with recurrent layers: pages, and slots with the states of all recurrent layers after a prefix.

A running request has one slot, which every step overwrites. A slot may also hold a *snapshot*, attached to the node of the prefix whose
states it has. A request can continue after a node that has a snapshot, and nowhere else: a match is the deepest such node. SGLang's
MambaRadixCache and vLLM's prefix caching of Mamba layers follow the same rule.

The index sees a block if its end has a snapshot, or if a longer prefix that contains it has one. See
docs/design/engine/recurrent-states.md.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

from msgspec import Struct

from fairlead_worker.cache.match import PrefixMatches
from fairlead_worker.cache.node import Node, PrefixMatch
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import ExtendHash, Lease, PrefixCache

ZEROS = -1
"""In place of a slot to start from: the request starts at its first token."""
PREVIOUS = -2
"""The same: the row continues the one before it in the step."""
FURTHER_SLOTS = 2
"""Beside those that are given out: one stays zero, and one is for padding."""


@dataclass(frozen=True, slots=True)
class StateSlots:
    """How many slots a worker has."""

    running: int
    """Most requests that run at once."""
    total: int
    """The slots of running requests, and of snapshots."""
    bytes: int
    """Of one slot."""

    @property
    def all_bytes(self) -> int:
        """Return what all slots take, with the further ones."""
        return (self.total + FURTHER_SLOTS) * self.bytes


class RowState(Struct, frozen=True, gc=False):
    """Where one row of a step has its states. A step reads `source` of every row before it writes any slot."""

    slot: int
    """Receives the states after the row's last token."""
    source: int
    """Holds the states before the row's first token; `ZEROS`: there are none."""
    snapshots: tuple[tuple[int, int], ...] = ()
    """(n, slot), n ascending: the slot receives the states after the row's first n tokens."""
    drafted: tuple[int, ...] = ()
    """Of a row that speculates: slots that receive the states after its first token, its second and so on, `slot` the last."""

    def singles(self, count: int) -> "list[RowState]":
        """Return one for each token of a row with `count` tokens that speculates."""
        taken = [tuple((1, slot) for n, slot in self.snapshots if n == place) for place in range(1, count + 1)]
        sources = self.source, *[PREVIOUS] * (count - 1)
        return [RowState(*parts) for parts in zip(self.drafted, sources, taken, strict=False)]


@dataclass(slots=True, eq=False)
class RequestStates:
    """The states of one running request."""

    slot: int
    source: int
    """Where its next row starts from."""
    kept: tuple[int, ...]
    """Positions in its prompt whose snapshots outlast it, ascending."""
    branch: int
    """The one where it leaves the pages of other prompts."""
    known: int
    """Tokens that it had when it was admitted."""
    steady: RowState
    """Of a decode without a snapshot."""
    begun: Node | None = None
    """The node after which it started, if only this request ever did."""
    pending: list[tuple[int, int]] = field(default_factory=list)
    """(position, slot) of snapshots that a step has written or will write, and that no node has yet."""
    drafted: tuple[int, ...] = ()
    """Slots for the tokens of the row that is planned or in flight, if it speculates."""
    latest: Node | None = None
    """The node with its latest snapshot that is not of `kept`. The next one takes its place, unless others use it too."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The states after a prefix."""

    slot: int
    owner: RequestStates | None
    """The running request that replaces it by its next one; None: it stays until it is evicted."""
    is_shared: bool = False
    """Whether a request has started from it, or several prompts are known to have its prefix."""


class StatePrefixCache(PrefixCache):
    """A `PrefixCache` in which a request continues after nodes with snapshots only.

    Snapshots are evicted freely, the longest unused first. Steps run in order, and each step reads before it writes, so that a slot can be
    given to another request while a step that reads it is in flight or is being planned.
    """

    def __init__(self, pool: PagePool, block_tokens: int, extend_hash: ExtendHash, slots: StateSlots, host_slots: int = 0) -> None:
        """Raises ValueError for a bad block size."""
        super().__init__(pool, block_tokens, extend_hash, host_slots)
        self._matches = PrefixMatches(pool.page_size, self.is_resumable)
        self._free_slots = list(range(slots.total - 1, -1, -1))
        self._most_pending = slots.total - slots.running
        """More would leave no slot for a request that is admitted."""
        self._most_drafted = (self._most_pending + 1) // 2
        """Drafts return in each step: with more of them, prompts would leave no snapshots."""
        self._num_pending = self._num_drafted = 0
        self._snapshots: OrderedDict[Node, Snapshot] = OrderedDict()
        """By node, the longest unused first."""
        self._below: dict[Node, int] = {}
        """Of each node at or above a snapshot: children with snapshots at or below them, and one for its own."""
        self._running: dict[Lease, RequestStates] = {}

    # Matching

    def is_resumable(self, node: Node) -> bool:
        """Return whether a request can continue after `node`."""
        return node.parent is None or node in self._snapshots

    def track(self, root: int, tokens: "array[int]", reusable: int | None = None, adapted: bool = False) -> PrefixMatch:
        match = super().track(root, tokens, reusable, adapted)
        self._use(match.node)
        return match

    def _use(self, node: Node) -> None:
        """Count a use of the node's snapshot now."""
        if node in self._snapshots:
            self._snapshots.move_to_end(node)

    def _follow(self, match: PrefixMatch, shown: bool) -> Node:
        """Return the deepest cached node of a tracked prompt, resumable or not; `shown`: of those at or above a snapshot."""
        node, raw, width = self.match(match), match.tokens.tobytes(), 4 * self.page_size
        while node.depth < match.limit:
            child = node.children.get(raw[node.depth * width : (node.depth + 1) * width])
            if child is None or (shown and child not in self._below):
                break
            node = child
        return node

    def _num_shown(self, match: PrefixMatch) -> int:
        return self._follow(match, shown=True).depth // self._block_pages

    # Leases

    def begin(self, lease: Lease, match: PrefixMatch) -> int:
        """Give a lease, attached to the node of `match`, a slot. Return how many tokens of the prompt the index shows.

        Snapshots of the prompt will be taken after its last whole block, which the next turn of a conversation continues, and where it
        leaves the pages that other prompts computed: the next prompt that shares these starts there.
        """
        node, size, block = lease.place, self.page_size, self.block_tokens
        known, shown = len(match.tokens), self._follow(match, shown=True)
        branch = self._follow(match, shown=False).depth * size // block * block
        kept = tuple(sorted(each for each in {branch, (known - 1) // block * block} if each > node.depth * size))
        source, begun = ZEROS, None
        if (snapshot := self._snapshots.get(node)) is not None:
            source, begun = snapshot.slot, None if snapshot.is_shared else node
            snapshot.owner, snapshot.is_shared = None, True
            self._use(node)
        slot = self._take_slot()
        self._running[lease] = RequestStates(slot, source, kept, branch, known, RowState(slot, slot), begun)
        return shown.depth * size

    def plan_row(self, lease: Lease, start: int, end: int) -> RowState:
        """Return where the states of a row with tokens `start` to `end` are, and plan its snapshots: as many as there are slots for."""
        request = self._running[lease]
        if request.source == request.slot and request.known <= start and end % self.block_tokens and not request.drafted:
            return request.steady
        positions = {position for position in request.kept if start < position <= end}
        if end % (self.page_size if end < request.known else self.block_tokens) == 0:
            positions.add(end)
        if request.drafted:
            positions.update(range((start // self.block_tokens + 1) * self.block_tokens, end, self.block_tokens))
        snapshots = []
        for position in sorted(positions):
            slot = self._take_for_snapshot()
            if slot is not None:
                request.pending.append((position, slot))
                snapshots.append((position - start, slot))
        source, request.source = request.source, request.slot
        return RowState(request.slot, source, tuple(snapshots), request.drafted)

    def take_drafts(self, lease: Lease, count: int) -> int:
        """Take a slot for each token of a row with `count` drafted ones, or for fewer of them. Return for how many."""
        request, slots = self._running[lease], list[int]()
        most = min(count, self._most_drafted - self._num_drafted)
        while len(slots) < most and (slot := self._take_for_snapshot()) is not None:
            slots.append(slot)
        self._num_drafted += len(slots)
        if slots:
            request.drafted = (*slots, request.slot)
        return len(slots)

    def settle(self, lease: Lease, start: int, computed: int) -> None:
        """Continue after `computed` tokens, of which a row that speculated has computed those from `start` on, and rejected ones."""
        request = self._running[lease]
        if not request.drafted:
            return
        request.slot = request.source = request.drafted[computed - start - 1]
        request.steady = RowState(request.slot, request.slot)
        rejected = [slot for position, slot in request.pending if position > computed]
        self._num_drafted -= len(request.drafted) - 1
        self._num_pending -= len(request.drafted) - 1 + len(rejected)
        self._free_slots += (*(slot for slot in request.drafted if slot != request.slot), *rejected)
        del request.pending[len(request.pending) - len(rejected) :]
        request.drafted = ()

    def end(self, lease: Lease) -> None:
        """Take the slot of a request that stops running, and of its snapshots that no node has."""
        request = self._running.pop(lease)
        drafted = request.drafted[:-1]  # the last one is its own
        self._num_drafted -= len(drafted)
        self._num_pending -= len(request.pending) + len(drafted)
        self._free_slots += (request.slot, *drafted, *(slot for _, slot in request.pending))

    def publish(self, lease: Lease, tokens: "array[int]", computed: int) -> None:
        super().publish(lease, tokens, computed)
        request = self._running[lease]
        while request.pending and request.pending[0][0] <= lease.shared * self.page_size:
            position, slot = request.pending.pop(0)
            node = lease.place
            while node.depth * self.page_size > position:
                assert node.parent is not None
                node = node.parent
            self._num_pending -= 1
            self._attach_snapshot(node, Snapshot(slot, None if position in request.kept else request, position == request.branch))
            if (
                request.begun is not None and request.begun in self._snapshots
            ):  # a conversation that went on: few continue from the turn before
                self._snapshots.move_to_end(request.begun, last=False)
            before, request.latest, request.begun = request.latest, node, None
            if before is not None and (snapshot := self._snapshots.get(before)) is not None and snapshot.owner is request:
                self._drop_snapshot(before)

    def insert_pending(self, lease: Lease, tokens: "array[int]", computed: int) -> None:
        """Do nothing: states of a step can be shared from the next one on."""

    # Snapshots

    def _take_slot(self) -> int:
        if not self._free_slots:
            self._evict_snapshot()
        return self._free_slots.pop()

    def _take_for_snapshot(self) -> int | None:
        if self._num_pending >= self._most_pending or not (self._free_slots or self._snapshots):
            return None
        self._num_pending += 1
        return self._take_slot()

    def _evict_snapshot(self) -> None:
        """Evict the snapshot that is unused for longest; one that a waiting prompt would continue from only if all are."""
        unawaited = (node for node in self._snapshots if node.trackers is None)
        self._drop_snapshot(next(unawaited, None) or next(iter(self._snapshots)))

    def _attach_snapshot(self, node: Node, snapshot: Snapshot) -> None:
        """Let requests continue after `node`. If it has a snapshot already, that one stays."""
        if (same := self._snapshots.get(node)) is not None:
            self._free_slots.append(snapshot.slot)
            same.owner = None
            self._use(node)
            return
        self._snapshots[node] = snapshot
        step = node
        while (parent := step.parent) is not None:
            self._matches.on_published(parent, step.key)
            if self.is_resumable(parent):
                break
            step = parent
        shown, step = [], node
        while (parent := step.parent) is not None:
            self._below[step] = self._below.get(step, 0) + 1
            if self._below[step] > 1:
                break
            shown.append(step)
            step = parent
        for step in reversed(shown):
            if not step.depth % self._block_pages and step.parent is not None:
                self._events.add_stored(step.chain, step.parent.chain)

    def _drop_snapshot(self, node: Node) -> None:
        self._free_slots.append(self._snapshots.pop(node).slot)
        self._matches.on_evicted(node)
        step = node
        while (parent := step.parent) is not None:
            self._below[step] -= 1
            if self._below[step]:
                return
            del self._below[step]
            if not step.depth % self._block_pages:
                self._events.add_removed(step.chain)
            step = parent

    # Inside

    def block_hashes(self) -> "array[int]":
        """Return the hashes of all shown and promised blocks, parents first."""
        shown = array("Q", (node.chain for node in self.nodes() if node in self._below and not node.depth % self._block_pages))
        known = set(shown)
        return shown + array("Q", (block for block in self._events.promised if block not in known))

    def _add_block(self, node: Node, parent: int) -> None:
        """Do nothing: a snapshot shows it."""

    def _remove_block(self, node: Node) -> None:
        if node in self._snapshots:
            self._drop_snapshot(node)

    def slots(self) -> tuple[list[int], dict[Node, int], list[RequestStates]]:
        """Return the free slots, those of snapshots by node, and what running requests hold, for tests and diagnosis."""
        return self._free_slots, {node: snapshot.slot for node, snapshot in self._snapshots.items()}, [*self._running.values()]

"""The real scheduler and cache around a fake forward pass whose KV can be checked.

The fake KV of a token is a hash of the root and all tokens up to it, as real KV is a function of them. Every row checks that the pages
it reads hold exactly the KV of its own request's tokens, so wrong sharing, early reuse and lost pages are all found where they hurt.
Greedy output is a hash of the prefix. So it must be the same with a cold or warm cache, in chunks, and after a preemption.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

from msgspec.structs import replace

from fairlead_index.hashing import extend
from fairlead_worker.cache.grouped import GroupedPrefixCache
from fairlead_worker.cache.grouped_host import GroupedHostTier
from fairlead_worker.cache.grouped_lease import GroupedLease, PageTable
from fairlead_worker.cache.groups import CacheGroups
from fairlead_worker.cache.make import make_cache
from fairlead_worker.cache.node import Node
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import Lease
from fairlead_worker.cache.states import ZEROS, StatePrefixCache, StateSlots
from fairlead_worker.ipc.messages import Load, Output, PoolingKind, Sampling, Submit, TokenLogprobs
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.plan import Row, StepPlan, StepResult
from fairlead_worker.scheduler.request import Request
from fairlead_worker.scheduler.scheduler import Scheduler

VOCABULARY = 40
EOS = 7


def root_value(root: int, adapter: bool) -> int:
    """Return the value before the first token: an adapter changes the KV, whatever its root number is."""
    return (root ^ (0xADA97E5 if adapter else 0)) & 0xFFFFFFFF


def kv(value: int, tokens: "array[int]") -> list[int]:
    """Return the KV of each position, from `root_value` on."""
    values = []
    for token in tokens:
        value = crc32(token.to_bytes(4, "little"), value)
        values.append(value)
    return values


def root_value_of(request: Request) -> int:
    return root_value(request.submit.root, bool(request.submit.adapter))


def next_token(value: int) -> int:
    return crc32(b"next", value) % VOCABULARY


def reference(submit: Submit, max_model_len: int) -> tuple[list[int], str]:
    """Return the tokens and the finish reason that a request must get, computed without an engine."""
    tokens, sampling = array("I", submit.tokens), submit.sampling
    prompt = len(tokens)
    stop = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    value = kv(root_value(submit.root, bool(submit.adapter)), tokens)[-1]
    while True:
        token = next_token(value)
        tokens.append(token)
        value = crc32(token.to_bytes(4, "little"), value)
        written = len(tokens) - prompt
        if token in stop and written >= sampling.min_tokens:
            return list(tokens[prompt:]), "stop"
        if written >= sampling.max_tokens or len(tokens) >= max_model_len:
            return list(tokens[prompt:]), "length"


@dataclass
class Answer:
    """The outputs that the client of one request has received."""

    submit: Submit
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    finish: str | None = None
    error: str = ""
    scores: list[float] = field(default_factory=list)
    pooled: list[int] = field(default_factory=list)
    """Positions whose states are in its embedding."""


def tables_of(pages: "array[int]") -> "list[array[int]]":
    """Return a row's page table of each group."""
    return [pages, *pages.others] if isinstance(pages, PageTable) else [pages]


def kv_of_group(value: int, group: int) -> int:
    return value ^ group << 32


class EngineModel:
    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        host_slots: int = 0,
        max_model_len: int = 1 << 20,
        block_pages: int = 2,
        groups: CacheGroups | None = None,
        snapshots: int = 0,
        **config: object,
    ) -> None:
        self.parents: dict[int, int] = {}
        self.held: set[int] = set()
        self.config = SchedulerConfig(max_model_len=max_model_len, eos_token_ids=(EOS,), **config)  # type: ignore[arg-type]  # test keywords
        self.groups, self.snapshots = groups, snapshots
        chunk = max(self.config.chunked_prefill_size, 0)
        pool = PagePool(pages, page_size)
        self.cache = make_cache(
            pool,
            page_size * block_pages,
            self._extend,
            host_slots=host_slots,
            groups=groups,
            chunk_tokens=max(chunk, page_size) if chunk else 0,
            states=StateSlots(self.config.max_num_seqs, self.config.max_num_seqs + snapshots, 1) if snapshots else None,
        )
        self.states: dict[int, int] = {}
        """What each slot holds: the value of the prefix that it is the state of."""
        self.pending: frozenset[int] = frozenset()
        self.cache.insert_pending = self._insert_pending  # type: ignore[method-assign]  # records the pages
        self.scheduler = Scheduler(self.config, self.cache)
        self.memory = [[0] * page_size for _ in range(pages)]
        self.host_memory = [[0] * page_size for _ in range(host_slots)]
        self.told: dict[str, Answer] = {}
        self.seconds: Callable[[StepPlan], float] = lambda plan: 0.01
        self.guess: Callable[[int], int] = lambda right: right
        """The draft model: maps the right next token to the drafted one. For the method "draft"."""
        self.plans: list[list[tuple[str, int, int]]] = []
        """Each step's rows: request, start, count."""

    def _insert_pending(self, lease: Lease, tokens: "array[int]", computed: int) -> None:
        before = lease.shared
        type(self.cache).insert_pending(self.cache, lease, tokens, computed)
        self.pending |= {page for table in tables_of(lease.pages) for page in table[before : lease.shared]}

    def take_pending(self) -> frozenset[int]:
        """Return the pages that were inserted before they were filled."""
        pending, self.pending = self.pending, frozenset()
        return pending

    def first_seen(self, group: int, position: int) -> int:
        """Return the first position that a token reads in a group."""
        windowed = self.groups is not None and group >= self.groups.full
        return self.groups.first_token(position) if windowed and self.groups is not None else 0

    def _extend(self, parent: int, tokens: "array[int]") -> int:
        block = extend(parent, tokens)
        self.parents[block] = parent
        return block

    # Events

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        root: int = 1,
        name: str = "",
        priority: int = 0,
        tenant: str = "",
        pooling: PoolingKind | None = None,
        adapter: int = 0,
        **sampling: object,
    ) -> str:
        name = name or f"r{len(self.told)}"
        settings = Sampling(max_tokens=max_tokens, temperature=0.0, **sampling)  # type: ignore[arg-type]  # test keywords
        message = Submit(name, array("I", prompt).tobytes(), settings, root, priority, tenant, adapter, pooling=pooling)
        self.told[name] = Answer(message)
        self._tell(self.scheduler.submit(message))
        return name

    def abort(self, name: str) -> None:
        self._tell(self.scheduler.abort(name))

    def step(self, abort_in_flight: str | None = None) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan or self.scheduler.idle, (
            f"empty step, waiting requests: {len(self.scheduler.waiting)}; policy {self.config.policy} must yield each of them"
        )
        self.plans.append([(row.request.id, row.start, row.count) for row in plan.rows])
        assert self.config.enable_mixed_chunk or not plan.decodes or not plan.prefill_tokens, "unmixed: one or the other"
        assert plan.samples == sum(row.samples for row in plan.rows)
        result = self._forward(plan)
        if abort_in_flight is not None:
            self.abort(abort_in_flight)
        for output in self.scheduler.advance(plan, result):
            self._tell(output)
        return plan

    def run(self, steps: int = 10_000) -> None:
        """Run steps until no request is left."""
        for _ in range(steps):
            if self.scheduler.idle:
                return
            assert self.step(), "an engine with requests found nothing to do"
            self.check()
        raise AssertionError(f"not idle after {steps} steps: {self.scheduler.load()}")

    def _tell(self, output: Output | None) -> None:
        if output is None:
            return
        told = self.told[output.id]
        assert told.finish is None, f"{output.id} had ended"
        assert told.cached_tokens in (None, output.cached_tokens) or output.finish in ("abort", "error"), "cached_tokens changed its mind"
        told.tokens += array("I", output.tokens)
        told.pooled += array("I", output.embedding)
        told.scores += [score.chosen for score in output.prompt_logprobs]
        if told.submit.sampling.prompt_logprobs is not None and told.tokens:
            assert len(told.scores) == len(told.submit.tokens) // 4 - 1, "scores come with the first token"
        told.cached_tokens, told.finish, told.error = output.cached_tokens, output.finish, output.error
        if output.finish not in (None, "abort", "error"):
            length = len(told.submit.tokens) // 4 + max(0, len(told.tokens) - 1)
            assert output.computed_tokens == length - output.cached_tokens, "the last token is not computed"

    def _forward(self, plan: StepPlan, pending: frozenset[int] | None = None) -> StepResult:
        """Run a step: every row stores before any row reads, as in each layer. `pending`: pages that were pending when it was planned."""
        size, pending = self.cache.page_size, self.take_pending() if pending is None else pending
        self._copy(plan)
        for row in plan.rows:
            assert row.request.lease.shared * size <= row.end, "a request shares no page that the step does not fill"
            for table in tables_of(row.pages):
                for page in table[row.start // size : row.request.lease.shared]:
                    self.memory[page] = [0] * size  # remove what an earlier request left in the page
        if self.config.speculative_method == "draft":
            plan = self._draft(plan)
        assert plan.drafted == sum(len(row.draft) for row in plan.rows)
        values = {id(row): kv(root_value_of(row.request), row.request.tokens + array("I", row.draft)) for row in plan.rows}
        written: set[tuple[int, int]] = set()
        for row in plan.rows:
            lease = row.request.lease
            assert lease is not None and row.count > 0
            assert row.samples == (row.request.pool is None and row.end == len(row.request.tokens) + len(row.draft))
            assert not row.draft or row.start == len(row.request.tokens) - 1, "only decodes speculate"
            assert len(row.draft) <= self.config.speculative_num_tokens
            assert row.end < row.request.length_limit or not row.draft, "no draft exceeds the length limit"
            assert all(len(table) * size >= row.end for table in tables_of(row.pages))
        for row in plan.rows:
            for position in range(row.start, row.end):
                index, slot = divmod(position, size)
                shared = index < row.request.lease.shared
                for group, table in enumerate(tables_of(row.pages)):
                    assert not shared or table[index] in pending, f"{row.request.id} writes into a shared page"
                    assert (table[index], slot) not in written, "two rows write one slot"
                    written.add((table[index], slot))
                    self.memory[table[index]][slot] = kv_of_group(values[id(row)][position], group)
        for row in plan.rows:
            for group, table in enumerate(tables_of(row.pages)):
                for position in range(self.first_seen(group, row.start), row.end):
                    found = self.memory[table[position // size]][position % size]
                    expected = kv_of_group(values[id(row)][position], group)
                    assert found == expected, f"{row.request.id} reads KV that is not its own at {position} in group {group}"
        sampled = [row for row in plan.rows if row.samples]
        assert sum(row.count for row in plan.rows[plan.decodes :]) == plan.prefill_tokens, "decodes come first"
        self._scan(plan, values)
        tokens, scores = [self._verified(row, values[id(row)]) for row in sampled], []
        if plan.scores:
            scores = [tuple(TokenLogprobs(float(p)) for p in row.request.to_score(row.start, row.end)) for row in plan.rows]
        return StepResult(tokens, seconds=self.seconds(plan), prompt_logprobs=scores, pooled=self._pooled(plan), executed=plan)

    def _scan(self, plan: StepPlan, values: dict[int, list[int]]) -> None:
        """Run the states of a step: every row reads before any row writes."""
        if not isinstance(self.cache, StatePrefixCache):
            assert all(row.state is None for row in plan.rows)
            return
        written: list[int] = []
        for row in plan.rows:
            assert row.state is not None
            expected = values[id(row)][row.start - 1] if row.start else None
            found = None if row.state.source == ZEROS else self.states[row.state.source]
            assert found == expected, f"{row.request.id} starts at {row.start} from a state that is not its own"
        for row in plan.rows:
            assert row.state is not None
            own = [*enumerate(row.state.drafted[: row.count], 1)] or [(row.count, row.state.slot)]
            for count, slot in (*own, *row.state.snapshots):
                self.states[slot] = values[id(row)][row.start + count - 1]
                written.append(slot)
        assert len(set(written)) == len(written), "no slot is written twice"

    @staticmethod
    def _pooled(plan: StepPlan) -> dict[str, bytes]:
        """The positions that went in, in their order, in the place of a sum."""
        wanted = {row.request: row.request.to_pool(row.start, row.end) for row in plan.rows}
        assert plan.pools == sum(map(bool, wanted.values()))
        return {one.id: one.pool.sum + array("I", positions).tobytes() for one, positions in wanted.items() if positions}

    def _copy(self, plan: StepPlan) -> None:
        """Saves in any order (here: the last first), then loads: so a runner may do each kind in one go."""
        saved, loaded = [slot for _, slot in plan.saves], [page for page, _ in plan.loads]
        assert len(set(saved)) == len(saved) and len(set(loaded)) == len(loaded), "nothing is written twice"
        assert plan or not (saved or loaded), "copies come with a forward pass"
        for page, slot in reversed(plan.saves):
            self.host_memory[slot] = self.memory[page].copy()
        for page, slot in reversed(plan.loads):
            self.memory[page] = self.host_memory[slot].copy()

    def _draft(self, plan: StepPlan) -> StepPlan:
        rows = []
        for row in plan.rows:
            text = array("I", row.request.tokens)
            for _ in range(row.num_drafts):
                text.append(self.guess(next_token(kv(root_value_of(row.request), text)[-1])))
            rows.append(row.with_draft(row.num_drafts, text[len(row.request.tokens) :].tolist()) if row.num_drafts else row)
        return replace(plan, rows=tuple(rows))

    @staticmethod
    def _verified(row: Row, values: list[int]) -> list[int]:
        """The model's own tokens at the row's last positions, as long as the draft says the same."""
        tokens: list[int] = []
        for place in range(len(row.draft) + 1):
            tokens.append(next_token(values[len(values) - len(row.draft) - 1 + place]))
            if row.draft[place : place + 1] != tokens[-1:]:
                break
        return tokens

    # Checks

    def check(self) -> None:
        """Every invariant, after every step."""
        self._check_requests()
        self._check_pages()
        self._check_blocks()
        self._check_slots()

    def rest(self) -> None:
        """Read what is launched, and check."""
        self.check()

    def check_answers(self) -> None:
        """Every request that was not aborted or refused has answered exactly as the reference."""
        for name, told in self.told.items():
            if told.finish not in ("abort", "error") and told.submit.pooling is None:
                assert (told.tokens, told.finish) == reference(told.submit, self.config.max_model_len), name

    def _check_requests(self) -> None:
        scheduler = self.scheduler
        running, waiting = scheduler.running, [*scheduler.waiting._requests.values()]
        assert {r.id for r in running} | {r.id for r in waiting} == set(scheduler._requests), "every request runs or waits"
        assert [r.arrival for r in running] == sorted(r.arrival for r in running), "running requests are in order of arrival"
        for request in running:
            assert 0 <= request.history.cached <= request.computed <= len(request.tokens)
            assert (request.uncomputed == 1) or request is scheduler.prefill.chunked_req, "at most one request is partly prefilled"
            if request is scheduler.prefill.chunked_req:
                assert request.computed % self.cache.page_size == 0, "chunks are cut at pages"
        for request in waiting:
            assert request.lease is None and request.prefix_match is not None, "a waiting request has a match and no pages"
            if request.prefix_match.is_current:
                assert request.prefix_match.node is self._deepest(request), "a current match is the deepest cached page"
        assert scheduler.batch.requests == [r for r in running if r is not scheduler.prefill.chunked_req]
        assert all(len(r.lease.pages) <= -(-len(r.tokens) // self.cache.page_size) for r in running), "no page is kept for drafts"
        decoding = [r for r in running if r is not scheduler.prefill.chunked_req]
        growing = [r for r in decoding if len(r.tokens) > len(r.lease.pages) * self.cache.page_size]
        assert sorted(r.id for r in scheduler.batch.growing) == sorted(r.id for r in growing) and not scheduler.deferred_frees
        assert all(r.history.priority_preemptions <= self.config.max_preemptions for r in running + waiting)
        assert scheduler.reserve.tokens == sum(r.reserved for r in running)
        for shares, amount in ((scheduler.admission._places, lambda r: 1), (scheduler.admission._pages, lambda r: r.expected_pages)):
            held = {(p, tenant): count for p, tenants in shares._held.items() for tenant, count in tenants.items()}
            assert +Counter(held) == +sum((Counter({(r.submit.priority, r.submit.tenant): amount(r)}) for r in running), Counter())
        queue, stale = scheduler.waiting, self.cache._matches._stale
        sizes = queue._sizes
        assert queue.tokens == sum(sizes.values()) and len(sizes) == len(waiting)
        assert queue._priorities == Counter(request.submit.priority for request in waiting)
        assert queue._by_arrival == {request.arrival: request for request in waiting}
        assert set(queue._unpromised) == {request for request in waiting if request.promised is None}
        for request in waiting:
            if request.prefix_match not in stale:
                size = len(request.tokens) - request.prefix_match.depth * self.cache.page_size
                assert sizes[request.prefix_match] == size, "the backlog counts uncached tokens"
        load: Load = scheduler.load()
        assert load.running == len(running) and load.waiting == len(waiting), "the load report counts running and waiting requests"

    def _deepest(self, request: Request) -> Node:
        roots = self.cache._adapter_roots if request.submit.adapter else self.cache._roots
        node, size = roots[request.submit.root], self.cache.page_size
        while (node.depth + 1) * size <= min(request.reusable, len(request.tokens) - 1):
            child = node.children.get(request.tokens[node.depth * size : (node.depth + 1) * size].tobytes())
            if child is None:
                break
            node = child
        while (
            isinstance(self.cache, GroupedPrefixCache | StatePrefixCache) and not self.cache.is_resumable(node) and node.parent is not None
        ):
            node = node.parent
        return node

    def _check_groups(self, cache: GroupedPrefixCache) -> None:
        """What `_check_pages` checks, of a cache in groups; and the rows of window pages."""
        pool, nodes, leases, size = cache.pool, list(cache.nodes()), [r.lease for r in self.scheduler.running], cache.page_size
        full, reach = cache.groups.full, cache.groups.reach(size)
        private, cached, users, used = list[int](), list[int](), Counter[Node](), set[Node]()
        for request, lease in zip(self.scheduler.running, leases, strict=True):
            assert isinstance(lease, GroupedLease)
            private += lease.pages[lease.shared :] if full else ()
            private += [page for table in lease.windows for page in table[max(lease.first, lease.shared) :]]
            node, path = lease.place, list[Node]()
            assert node.depth == lease.shared
            while node.parent is not None:
                assert not full or lease.pages[node.depth - 1] == node.page, "every shared page is a published prefix"
                assert node.key == request.tokens[(node.depth - 1) * size : node.depth * size].tobytes()
                path.append(node)
                node = node.parent
            used.update(path)
            assert all(step.page >= 0 for step in path), "running requests have their pages on the device"
            assert [*lease.held] == path[::-1][lease.first :], "a lease holds the window pages from its first one on"
            for each in lease.held:
                assert tuple(table[each.depth - 1] for table in lease.windows) == cache._pages[each].pages
            users.update(lease.held)
            assert lease.first <= cache.groups.first_token(request.computed) // size, "no page within the window is gone"
            if request is not self.scheduler.prefill.chunked_req and request.unread == 0:
                assert lease.window_pages <= reach + 1 + cache.block_tokens // size, "pages behind the window are given back"
        for node in nodes:
            cached += [node.page] if full and node.page >= 0 else []
            page, parent = cache._pages.get(node), node.parent
            assert parent is not None and (page is not None or node.children or node.lock_ref), "a useless node is forgotten"
            assert node.device_children == sum(child.page >= 0 for child in node.children.values())
            assert not full or node.page < 0 or node.device_children or node.lock_ref or page.pages, "nor does it stay on the device"
            assert node.page < 0 or parent.page >= 0 or parent.parent is None, "what is on the device is prefix-closed"
            if page is None:
                continue
            cached += page.pages
            before = cache._pages.get(parent)
            assert page.run == min(1 + (before.run if before is not None else 0), reach), "the run counts the pages before"
            assert page.leases == users[node] and (node in cache._idle) + (node in cache._ends) == (bool(page.pages) and not page.leases)
        idle = [*cache._idle, *cache._ends]
        assert cache._pages.keys() <= set(nodes)
        assert len(idle) == sum(bool(page.pages) and not page.leases for page in cache._pages.values())
        self._check_groups_host(cache, nodes)
        free = pool.free_pages()
        assert (len(free), len(private), len(cached)) == (pool.free, pool.leased, pool.cached), "counters match the pages"
        assert sorted([*free, *private, *cached]) == list(range(pool.total)), "each page is in one place"
        assert cache.evictable == sum(node.page >= 0 and node not in used for node in nodes) * full + len(idle) * cache.groups.windowed
        assert all((node.lock_ref > 0) == (node in used) for node in nodes)
        shown = set[Node]()
        for node in nodes:
            if not node.depth * size % cache.block_tokens and cache.is_resumable(node):
                above = cache.shown.last_block(node.parent)
                if above.parent is None or above in shown:
                    shown.add(node)
        assert shown == cache.shown.nodes, "a block is shown while a request can continue after it and all blocks before it"

    def _check_groups_kv(self, cache: GroupedPrefixCache) -> None:
        values = {root: root_value(root.chain, root in cache._adapter_roots.values()) for root in cache.roots()}
        for node in cache.nodes():
            value, found = values[node.parent], []
            for token in array("I", node.key):
                value = crc32(token.to_bytes(4, "little"), value)
                found.append(value)
            values[node] = value
            pages = [node.page] if cache.groups.full else []
            pages += (cache._pages[node].pages if node in cache._pages else ()) or [-1] * cache.groups.windowed
            for group, page in enumerate(pages):
                assert page < 0 or self.memory[page] == [kv_of_group(each, group) for each in found], "a cached page holds its prefix"
            slots = [node.slot] if cache.groups.full else []
            slots += cache.host.windows.get(node, ()) if isinstance(cache.host, GroupedHostTier) else ()
            for group, slot in enumerate(slots):
                assert slot < 0 or self._host_kv(slot) == [kv_of_group(each, group) for each in found], "and so does a slot of the host"

    def _host_kv(self, slot: int) -> list[int]:
        """Return what a slot of the host holds, or will when the next plan has saved it: a page can leave the device between two plans."""
        assert self.cache.host is not None
        page = self.cache.host._saves.get(slot)
        return self.host_memory[slot] if page is None else self.memory[page]

    def _check_groups_host(self, cache: GroupedPrefixCache, nodes: list[Node]) -> None:
        """Every slot is free or used once, and what is only on the host can be dropped."""
        host = cache.host
        if host is None:
            assert all(page.pages for page in cache._pages.values()) and all(node.page >= 0 for node in nodes)
            return
        assert isinstance(host, GroupedHostTier) and not host._loading
        used = [node.slot for node in nodes if node.slot >= 0] + [slot for slots in host.windows.values() for slot in slots]
        assert sorted([*used, *host._free]) == list(range(host.total)), "no slot is lost, and none is used twice"
        assert set(host._host_only) == {node for node, page in cache._pages.items() if not page.pages} <= host.windows.keys()
        both = {(node, True) for node in host.windows if cache._pages[node].pages}
        assert set(host._on_both) == both | {(node, False) for node in nodes if node.page >= 0 and node.slot >= 0}

    def _check_pages(self) -> None:
        cache, size = self.cache, self.cache.page_size
        if isinstance(cache, GroupedPrefixCache):
            self._check_groups(cache)
            self._check_groups_kv(cache)
            return
        pool, nodes = cache.pool, list(cache.nodes())
        self._check_tiers(nodes)
        nodes = [node for node in nodes if node.page >= 0]
        free, cached = pool.free_pages(), {node.page for node in nodes}
        private: set[int] = set()
        used: set[Node] = set()
        for request in self.scheduler.running:
            lease = request.lease
            assert lease is not None
            own = lease.pages[lease.shared :]
            assert not private & set(own) and len(set(own)) == len(own), "a private page belongs to one request"
            private |= set(own)
            node = lease.place
            assert node.depth == lease.shared
            while node.parent is not None:
                assert lease.pages[node.depth - 1] == node.page, "every shared page is a published prefix"
                assert node.key == request.tokens[(node.depth - 1) * size : node.depth * size].tobytes()
                used.add(node)
                node = node.parent
        assert pool.free + pool.leased + pool.cached == pool.total
        assert (len(free), len(private), len(cached)) == (pool.free, pool.leased, pool.cached), "counters match the pages"
        assert len(free | private | cached) == pool.total, "no page is lost"
        assert cache.evictable == len(nodes) - len(used), "unused blocks can be evicted"
        assert all((node.lock_ref > 0) == (node in used) for node in nodes)

    def _check_tiers(self, nodes: list[Node]) -> None:
        """Where each cached page is, and that its KV is there."""
        host, size = self.cache.host, self.cache.page_size
        values = {root: root_value(root.chain, root in self.cache._adapter_roots.values()) for root in self.cache.roots()}
        for node in nodes:
            parent = node.parent
            assert parent is not None
            found, value = [], values[parent]
            for token in array("I", node.key):
                value = crc32(token.to_bytes(4, "little"), value)
                found.append(value)
            values[node] = value
            assert len(found) == size
            assert node.page < 0 or self.memory[node.page] == found, "a cached page holds its prefix"
            assert node.slot < 0 or self._host_kv(node.slot) == found, "and so does a slot of the host"
            assert node.page < 0 or parent.page >= 0 or parent.parent is None, "what is on the device is prefix-closed"
            assert node.device_children == sum(child.page >= 0 for child in node.children.values())
            assert node.page >= 0 or not node.lock_ref, "running requests have their pages on the device"
        if host is None:
            assert all(node.slot < 0 for node in nodes)
            return
        slots = [node.slot for node in nodes if node.slot >= 0]
        assert len(set(slots)) == len(slots) and not set(slots) & set(host._free), "each slot is free or one page's"
        assert len(slots) + len(host._free) == host.total, "no slot is lost"
        assert set(host._host_only) == {node for node in nodes if node.page < 0}
        assert set(host._on_both) == {node for node in nodes if node.page >= 0 and node.slot >= 0}
        order = {node: place for place, node in enumerate(host._host_only)}
        assert all(order[child] < place for node, place in order.items() for child in node.children.values()), "leaves go first"

    def _check_slots(self) -> None:
        """Every slot is free, or held once, and snapshots are the states of their prefixes."""
        if not isinstance(self.cache, StatePrefixCache):
            return
        free, snapshots, held = self.cache.slots()
        used = [*free, *snapshots.values(), *(each.slot for each in held), *(slot for each in held for _, slot in each.pending)]
        assert sorted(used) == list(range(self.config.max_num_seqs + self.snapshots)), "no slot is lost, and none is used twice"
        assert len(held) == len(self.scheduler.running)
        assert (self.cache._num_pending, self.cache._num_drafted) == (sum(len(each.pending) for each in held), 0)
        assert len(free) + len(snapshots) >= self.config.max_num_seqs - len(held), "whatever is admitted gets a slot"
        for node, slot in snapshots.items():
            text, step = array("I"), node
            while step.parent is not None:
                text, step = array("I", step.key) + text, step.parent
            assert node.cached and self.states[slot] == kv(root_value(step.chain, step in self.cache._adapter_roots.values()), text)[-1]

    def _check_blocks(self) -> None:
        for event in self.scheduler.cache.drain_events():
            for block in array("Q", event.hashes):
                if event.kind == "stored":
                    assert block not in self.held and (self.parents[block] in self.held or self.parents[block] not in self.parents)
                    self.held.add(block)
                else:
                    self.held.remove(block)
                    assert all(self.parents[other] != block for other in self.held), "children go before their parents"
        block_hashes = list(self.cache.block_hashes())
        assert len(set(block_hashes)) == len(block_hashes) and set(block_hashes) == self.held, "the snapshot contains what the events say"
        shown = {
            node.chain for node in self.cache.nodes() if node.depth and not node.depth * self.cache.page_size % self.cache.block_tokens
        }
        if isinstance(self.cache, GroupedPrefixCache):
            shown = {node.chain for node in self.cache.shown.nodes}
        if isinstance(self.cache, StatePrefixCache):
            above = set()
            for node in self.cache.slots()[1]:
                while node.parent is not None:
                    above.add(node)
                    node = node.parent
            assert above == self.cache._below.keys()
            shown = {node.chain for node in above if not node.depth * self.cache.page_size % self.cache.block_tokens}
        for request in self.scheduler._requests.values():
            shown.update(request.promised or ())
        assert shown == self.held, "the index shows what is cached or promised by a request, and nothing else"

"""The scheduler: which tokens of which requests are computed in the next step. Pure bookkeeping: no torch, no clock, no I/O."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from operator import attrgetter

from fairlead_index.hashing import token_bytes
from fairlead_worker.cache.node import Node
from fairlead_worker.cache.prefix import Lease, PrefixCache
from fairlead_worker.messages import CacheEvent, Load, Output, Submit, TokenLogprobs
from fairlead_worker.scheduler.admission_control import AdmissionControl
from fairlead_worker.scheduler.budget import OutputReserve, StepBudget
from fairlead_worker.scheduler.chunk_sizer import ChunkSizer
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.deferred_frees import DeferredFrees, release
from fairlead_worker.scheduler.plan import Row, StepPlan, StepResult
from fairlead_worker.scheduler.request import Request, lease_of
from fairlead_worker.scheduler.speculation import Speculation
from fairlead_worker.scheduler.stats import EngineStats
from fairlead_worker.scheduler.step_outputs import StepOutputs
from fairlead_worker.scheduler.validation import InvalidRequest, refusal, validate
from fairlead_worker.scheduler.waiting_queue import WaitingQueue

IDLE_SECONDS = 1.0
"""Of a step with several chunks."""


class Scheduler:
    """`submit` and `abort` at any time; `plan` a step, run it, `advance` by its result.

    A request waits (no pages, in `waiting`) or runs (a lease, in `running`, by arrival). Whether it prefills or decodes is derived. At most
    one running request is partly prefilled, `chunked_req`; every other one has exactly one token to compute.
    """

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        self.config = config
        self.cache = cache
        self.running: list[Request] = []
        self.waiting = WaitingQueue(config, cache)
        self.chunked_req: Request | None = None
        self.begun: Request | None = None
        """`chunked_req` while it is held: it began alone, and its end is for the step in which others may come in."""
        self.reserve = OutputReserve(config)
        self.chunk_sizer = ChunkSizer(config, cache.page_size) if config.itl_target_ms > 0 else None
        self.speculation = Speculation(config) if config.speculative_method != "none" else None
        self.stats = EngineStats()
        self._requests: dict[str, Request] = {}
        self._decodes: list[Row] = []
        """Rows of the running requests that decode, by arrival: kept from step to step, so that a step makes none."""
        self._growing: list[Request] = []
        """Decoding requests whose next token needs a page."""
        self.admission = AdmissionControl(config, cache, self.reserve, self.running, self._growing)
        self._deferred_frees = DeferredFrees()
        self.arrivals = self.ended = 0
        """Requests that were taken in, and those of them that came to their end."""
        self._apart = False  # a prompt to be scored has the next step: no decodes beside it, but they have the one after
        self._page_size = cache.page_size

    # In

    def submit(self, message: Submit) -> Output | None:
        """Takes a request in, or answers with the refusal of one that could never run here."""
        if message.id in self._requests:
            return refusal(message.id, f"a request with the id {message.id!r} is already here")
        try:
            request = validate(message, self.arrivals, self.config, self.cache.pool.total, self._page_size)
        except InvalidRequest as error:
            return refusal(message.id, str(error))
        self.arrivals += 1
        self._requests[request.id] = request
        self.waiting.add(request)
        return None

    def abort(self, request_id: str) -> Output | None:
        """Drops a request in whatever state it is; its pages are back at once, or when its step is. Unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        request.finish = "abort"
        if request.lease is None:
            self.waiting.remove(request)
        else:
            self._leave(request)
            self._deferred_frees.add(request)
        return Output(request.id, b"", request.first_cached or 0, finish="abort")

    @property
    def idle(self) -> bool:
        """Nothing to compute."""
        return not self._requests

    @property
    def idle_prefill(self) -> int:
        """Tokens that a step may prefill while nothing decodes: chunks are for those that do. What comes meanwhile waits for it, so
        several of them are what a second or so computes."""
        size = self.config.chunked_prefill_size
        return max(size, min(size * self.config.idle_prefill_chunks, int(IDLE_SECONDS * self.stats.prefill_rate)))

    # A step

    def plan(self, admits: bool = True, begins: int = 0) -> StepPlan:
        """Chooses the work of one step: decodes first, then the open chunk, then admissions, within the step's token and page budget.

        `admits`: whether requests that wait may come in; it changes nothing for those that run. Where they may not and nothing runs, the
        first of them with `begins` tokens to compute before its last page begins (0: nobody does), and is held there until they may.
        With mixing off, a step is the prefill that there is to do, or else the decodes. Rows come in arrival order. An empty plan means
        that there is nothing to do.
        """
        plan = StepPlan()
        if self.config.policy == "priority" and admits:
            self._preempt()
        mixed, self._apart = self.config.enable_mixed_chunk and not self._apart, False
        if mixed:
            self._extend_running(plan)
        begins = 0 if admits or self.running else begins
        if (self.chunked_req is not None and (admits or self.begun is None)) or (len(self.waiting) and (admits or begins)):
            self._add_prefill(plan, admits, begins)
        if not mixed and not plan.rows:
            self._extend_running(plan)
        if self.speculation is not None and plan.decodes:
            self.speculation.extend(plan, self._decodes, self.cache)
        plan.left_out = len(self._decodes) - plan.decodes
        if plan.rows:
            plan.number = self._deferred_frees.planned()
            if self.cache.host is not None:
                plan.saves, plan.loads = self.cache.host.take_copies()
        return plan

    def advance(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Takes in what a step brought: new tokens, filled pages, finished requests."""
        if plan.samples != len(result.tokens):
            raise ValueError(f"the plan has {plan.samples} rows that sample, the result {len(result.tokens)} lists of tokens")
        for row, scores in zip(plan.rows, result.prompt_logprobs, strict=False):  # none, or one for each row
            row.request.score(scores)
        if plan.pools:
            for row in plan.rows:
                if row.request.pool is not None and row.request.id in result.pooled:
                    row.request.pool.add(result.pooled[row.request.id], row.end)
        self._look_at(result.endings)
        self._deferred_frees.returned(plan.number)
        outputs = self._advance_rows(plan, result) if result.logprobs else self._advance_quickly(plan, result)
        if self.chunk_sizer is not None and not plan.scores:  # the head has run on the whole prompt: that tells nothing of other prompts
            self.chunk_sizer.observe(plan.costs, result.seconds)
        if self.speculation is not None:
            self.speculation.observe(plan, result)
        self.stats.step(plan.prefill_tokens, plan.decodes, result.seconds)
        return outputs

    def _look_at(self, names: Iterable[str]) -> None:
        """Something has happened to these requests: the step brings them more than a token."""
        for name in names:
            if name in self._requests:
                self._requests[name].alarm = 0

    def _advance_rows(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        outputs = StepOutputs()
        sampled, logprobs = iter(result.tokens), iter(result.logprobs)
        for row in plan.rows:
            tokens, scores = (next(sampled), next(logprobs)) if row.samples else ((), ())
            self._advance_row(row, tokens, scores, outputs.told, result.endings)
        return outputs

    def _advance_quickly(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """The same, and nearly nothing for a decode that only adds a token.

        No calls but to C until a block fills, and the counters are brought up to date once for all: this loop is most of what a step
        costs the scheduler.
        """
        outputs = StepOutputs()
        rows, block, decoded, took = plan.rows, self.cache.block_tokens, outputs.decoded.append, outputs.tokens.append
        if plan.samples < len(rows):
            for row in [row for row in rows if not row.samples]:
                self._advance_row(row, (), (), outputs.told, result.endings)
            rows = [row for row in rows if row.samples]
        for row, tokens in zip(rows, result.tokens, strict=False):  # `advance` has compared the lengths
            request = row.request
            computed = row.start + 1
            if computed < request.alarm and tokens and (token := tokens[0]) not in request.stop_tokens:
                row.start = request.computed = computed
                request.tokens.append(token)
                decoded(request)
                took(token)
                if computed == request.page_end:
                    request.page_end += self._page_size
                    self._growing.append(request)
                    if not computed % block:
                        self._block_filled(request)
            else:
                self._advance_row(row, tokens, (), outputs.told, result.endings)
        self._wrote(len(outputs.tokens))
        return outputs

    def _advance_row(
        self,
        row: Row,
        tokens: Sequence[int],
        logprobs: tuple[TokenLogprobs, ...],
        outputs: list[Output],
        endings: Mapping[str, str],
    ) -> None:
        request = row.request
        if request.finish is not None:  # aborted while its step ran
            return
        lease = lease_of(request)
        if row.samples:
            ending = endings.get(request.id) if endings else None
            if tokens or ending is not None:
                outputs.append(self._take_tokens(request, tokens, logprobs, ending))
            if self.speculation is not None and row is request.row:
                self.speculation.took(row, lease)
        computed = request.computed = len(request.tokens) - 1 if row.samples else row.end
        if request.pool is not None and computed == len(request.tokens):
            request.finish = "stop"
            outputs.append(Output(request.id, b"", request.first_cached or 0, "stop", embedding=request.pool.embedding()))
        if request.finish is not None:
            self._finish(request)
            return
        if row.count > 1 or computed // self.cache.block_tokens > row.start // self.cache.block_tokens:
            self._block_filled(request)
        if row.samples:
            self._decode_next(request, lease)

    def _decode_next(self, request: Request, lease: Lease) -> None:
        """Makes its row for the next step, and finds when it must be looked at again."""
        if request.row is None:
            request.row = Row(request, request.computed, 1, lease.pages, True)
            insort(self._decodes, request.row, key=_row_arrival)
        else:
            request.row.start = request.computed
        if len(request.tokens) > len(lease.pages) * self._page_size:
            self._growing.append(request)
        self.reserve.renew(request)
        request.page_end = (request.computed // self._page_size + 1) * self._page_size
        request.alarm = 0 if request.silent else min(request.length_limit, request.reserved_end) - 1

    def _block_filled(self, request: Request) -> None:
        """What it has computed goes to the cache. By blocks, as the index knows no less: page by page would cost more and tell nobody
        anything sooner."""
        self.cache.publish(lease_of(request), request.tokens, request.computed)
        if self.waiting.fair is not None:
            self.waiting.fair.wrote(request)

    def _wrote(self, tokens: int) -> None:
        self.reserve.wrote(tokens)
        self.stats.output_tokens += tokens

    # Out

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """Blocks that the prefix cache began or ceased to hold since the last call."""
        return self.cache.drain_events()

    def load(self) -> Load:
        """The state now, for the router and /metrics. O(1)."""
        stats, pool, chunked, host = self.stats, self.cache.pool, self.chunked_req, self.cache.host
        return Load(
            running=len(self.running),
            waiting=len(self.waiting),
            backlog_tokens=self.waiting.tokens + (chunked.uncomputed if chunked is not None else 0),
            prefill_rate=stats.prefill_rate,
            step_seconds=stats.step_seconds,
            pages_total=pool.total,
            pages_free=self.cache.available,
            pages_cached=pool.cached,
            steps=stats.steps,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            output_tokens=stats.output_tokens,
            retractions=stats.retractions,
            evicted_pages=self.cache.evicted_pages,
            retraction_recomputed_tokens=stats.recomputed_tokens,
            host=None if host is None else host.report(stats.host_cached_tokens),
            drafts=None if self.speculation is None else self.speculation.counts(),
        )

    # Planning

    def _extend_running(self, plan: StepPlan) -> None:
        """Every request that decodes gets its token, and a page where it needs one. Nothing comes before this: no decode ever waits."""
        if len(self._growing) > self.cache.available:
            self._make_room()
        else:
            self.reserve.decay()
        if self._growing:
            self.cache.grow_each([lease_of(request) for request in self._growing])
            self._growing.clear()
        plan.rows = self._decodes.copy()
        plan.decodes = plan.samples = len(plan.rows)
        if self.chunk_sizer is not None:
            plan.decode_context = sum([row.start for row in plan.rows])

    def _make_room(self) -> None:
        """Retracts until the others can go on."""
        while (victim := self.admission.to_retract()) is not None:
            self.reserve.retracted(self.running)
            self._retract(victim)
            self.waiting.add_retracted(victim)

    def _preempt(self) -> None:
        """Retracts running requests of less priority than the first that waits, if that lets it run; else nobody is touched."""
        urgent = self.waiting.most_urgent()
        for victim in self.admission.to_preempt(urgent) if urgent is not None else ():
            victim.preemptions += 1
            self._retract(victim)
            self.waiting.add(victim)

    def _retract(self, request: Request) -> None:
        """Out of its pages, to wait again. What it published stays cached until somebody needs the room."""
        self._leave(request)
        release(request)
        self.stats.retractions += 1
        request.retractions += 1
        request.lost = request.computed
        request.computed = request.cached = 0

    def _add_prefill(self, plan: StepPlan, admits: bool, begins: int) -> None:
        """The next chunk of the partly prefilled request, whose pages were leased at admission, so it always gets on; then admissions."""
        prefill_budget = (
            None
            if self.chunk_sizer is None
            else self.chunk_sizer.prefill_budget(plan.decodes, plan.decode_context, self.stats.prefill_rate)
        )
        budget = StepBudget(self.config, self._page_size, plan.decodes, prefill_budget, 0 if self._decodes else self.idle_prefill)
        if self.chunked_req is not None:
            if self.chunked_req.scoring and plan.decodes:
                self._apart = True
                return
            self._prefill(self.chunked_req, plan, budget)
        if len(self.waiting) and (admits or begins):
            self._admit_waiting(plan, budget, begins)
        plan.prefill_tokens, plan.prefill_work = budget.spent, budget.work

    def _admit_waiting(self, plan: StepPlan, budget: StepBudget, begins: int) -> None:
        """New requests in policy order, while tokens and pages last. `begins`: one with so many of them, but for its last page."""
        self.waiting.refresh()
        if len(self.running) >= self.config.max_num_seqs or budget.left <= 0:
            return
        if not self.running:
            self.reserve.reset()
        with closing(self.waiting.candidates()) as candidates:
            for request in candidates:
                if len(self.running) >= self.config.max_num_seqs:
                    return
                assert request.watch is not None, "candidates wait"
                node = self.cache.match(request.watch)
                cached = node.depth * self._page_size
                if begins and not budget.hold_back(len(request.tokens) - cached, begins):
                    continue
                if not budget.cut(len(request.tokens) - cached, cached):
                    return
                if self.admission.lacking(request, node) <= 0:
                    if request.scoring and plan.decodes:
                        self._apart = True
                        return
                    self._admit(request, node)
                    self._prefill(request, plan, budget)
                    if begins:
                        self.begun = request
                        return

    def _admit(self, request: Request, node: Node) -> None:
        """Leases the pages of all its known tokens, the cached ones shared."""
        request.lease = self.cache.attach(node)  # before the watch goes: one of the two keeps the tree
        self.waiting.admitted(request)
        self.cache.grow(request.lease, len(request.tokens))
        request.cached = request.computed = node.depth * self._page_size
        request.silent = True
        if request.first_cached is None:
            request.first_cached = request.cached
            request.first_loaded = request.lease.loaded * self._page_size
            self.stats.host_cached_tokens += request.first_loaded
            self.stats.prompt_tokens += request.prompt_length
            self.stats.cached_tokens += request.cached
            if self.waiting.fair is not None:
                self.waiting.fair.admitted(request)
        else:
            self.stats.recomputed_tokens += max(request.lost - request.cached, 0)
        insort(self.running, request, key=_arrival)

    def _prefill(self, request: Request, plan: StepPlan, budget: StepBudget) -> None:
        """As much of the request as the budget has; what is left makes it `chunked_req`. Until then it reserves no output."""
        self.begun = None
        count = budget.cut(request.uncomputed, request.computed)
        budget.spend(count, request.computed)
        whole = count == request.uncomputed
        if whole:
            self.chunked_req = None if request is self.chunked_req else self.chunked_req
            self.reserve.add(request)
        else:
            assert self.chunked_req in (None, request), "one partly prefilled request at a time"
            self.chunked_req = request
            budget.left = 0  # what rounding to a page has left over is nobody's: a second prompt would be cut too
        lease, end = lease_of(request), request.computed + count
        samples = whole and request.pool is None
        certain = end - 1 if samples else end  # the last position is computed again if its token does not come
        if 0 < self.config.dedupe_tokens <= certain:
            self.cache.promise(lease, request.tokens, certain)
        plan.samples += samples
        plan.pools += bool(request.to_pool(request.computed, end))
        plan.scores += bool(request.to_score(request.computed, end))
        insort(plan.rows, Row(request, request.computed, count, lease.pages, samples), key=_row_arrival)

    # Results

    def _take_tokens(
        self, request: Request, tokens: Sequence[int], logprobs: tuple[TokenLogprobs, ...], ending: str | None = None
    ) -> Output:
        """Adds sampled tokens until one ends the request. The one place that decides how a request finishes.

        `ending`: its grammar ends behind these tokens; not empty: that is a failure, and why.
        """
        known, stop_tokens, taken = request.tokens, request.stop_tokens, 0
        stop_token: int | None = None
        for token in tokens:
            known.append(token)
            taken += 1
            if token in stop_tokens and len(known) - request.prompt_length >= request.sampling.min_tokens:
                request.finish, stop_token = "stop", token
                break
            if len(known) >= request.length_limit:
                request.finish = "length"
                break
        if ending is not None and taken == len(tokens) and stop_token is None:
            request.finish = "error" if ending else "stop"
        self._wrote(taken)
        request.silent = request.silent and not taken
        text, cached = token_bytes(tokens[:taken]), request.first_cached or 0
        return Output(request.id, text, cached, request.finish, stop_token, ending or "", logprobs[:taken], None, request.take_scores())

    def _finish(self, request: Request) -> None:
        del self._requests[request.id]
        self.ended += 1
        self._leave(request)
        self._deferred_frees.add(request)

    def _leave(self, request: Request) -> None:
        """It runs no more; the pages that it has filled are the cache's."""
        self.cache.publish(lease_of(request), request.tokens, request.computed)
        del self.running[bisect_left(self.running, request.arrival, key=_arrival)]
        if self.waiting.fair is not None:
            self.waiting.fair.wrote(request)
        self.reserve.drop(request)
        request.alarm = 0
        if request.row is not None:
            del self._decodes[bisect_left(self._decodes, request.arrival, key=_row_arrival)]
            request.row = None
        if request in self._growing:
            self._growing.remove(request)
        if request is self.chunked_req:
            self.chunked_req = self.begun = None


_arrival, _row_arrival = attrgetter("arrival"), attrgetter("request.arrival")

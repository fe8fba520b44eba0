"""The scheduler: chooses which tokens of which requests the next step computes. Pure bookkeeping: no torch, no clock, no I/O."""

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
"""Target duration of a prefill-only step that holds several chunks."""


class Scheduler:
    """Plans steps over waiting and running requests.

    Call `submit` and `abort` at any time. For each step, call `plan`, run the plan, and pass its result to `advance`.

    A request waits (no pages, in `waiting`) or runs (a lease, in `running`, by arrival). Its progress decides whether it prefills or
    decodes. At most one running request is partly prefilled, `chunked_req`. Every other running request has exactly one token to compute.
    """

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        self.config = config
        self.cache = cache
        self.running: list[Request] = []
        self.waiting = WaitingQueue(config, cache)
        self.chunked_req: Request | None = None
        self.reserve = OutputReserve(config)
        self.chunk_sizer = ChunkSizer(config, cache.page_size) if config.itl_target_ms > 0 else None
        self.speculation = Speculation(config) if config.speculative_method != "none" else None
        self.stats = EngineStats()
        self._requests: dict[str, Request] = {}
        self._decodes: list[Row] = []
        """Rows of the decoding requests, by arrival. They are reused in every step, so that a step creates no row."""
        self._growing: list[Request] = []
        """Decoding requests whose next token needs a page."""
        self.admission = AdmissionControl(config, cache, self.reserve, self.running, self._growing)
        self._deferred_frees = DeferredFrees()
        self._arrivals = 0
        """Requests accepted so far."""
        self._exclude_decodes = False  # the next step computes prompt logprobs without decodes; the step after it has them again
        self._page_size = cache.page_size

    # Input

    def submit(self, message: Submit) -> Output | None:
        """Accept a request. Return a refusal if the request could never run here."""
        if message.id in self._requests:
            return refusal(message.id, f"a request with the id {message.id!r} already exists")
        try:
            request = validate(message, self._arrivals, self.config, self.cache.pool.total, self._page_size)
        except InvalidRequest as error:
            return refusal(message.id, str(error))
        self._arrivals += 1
        self._requests[request.id] = request
        self.waiting.add(request)
        return None

    def abort(self, request_id: str) -> Output | None:
        """Drop a request in any state and ignore unknown ids. Its pages become free now, or when the step in flight ends."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        request.finish = "abort"
        if request.lease is None:
            self.waiting.remove(request)
        else:
            self._stop_running(request)
            self._deferred_frees.add(request)
        return Output(request.id, b"", request.first_cached or 0, finish="abort")

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._requests

    @property
    def idle_prefill(self) -> int:
        """Tokens that a step may prefill while nothing decodes.

        Chunks exist to protect decodes, so an idle step may hold several. New requests wait for the step to end, so about one second
        (`IDLE_SECONDS`) of prefill is the limit above one chunk.
        """
        size = self.config.chunked_prefill_size
        return max(size, min(size * self.config.idle_prefill_chunks, int(IDLE_SECONDS * self.stats.prefill_rate)))

    # Step

    def plan(self) -> StepPlan:
        """Choose the work of one step: decodes first, then the open chunk, then admissions, within the token and page budget.

        With mixing off, a step holds the prefill if there is any, and else the decodes. Rows come in arrival order. An empty plan means
        that there is nothing to do.
        """
        plan = StepPlan()
        if self.config.policy == "priority":
            self._preempt_for_priority()
        mixed, self._exclude_decodes = self.config.enable_mixed_chunk and not self._exclude_decodes, False
        if mixed:
            self._extend_running(plan)
        if self.chunked_req is not None or len(self.waiting):
            self._add_prefill(plan)
        if not mixed and not plan.rows:
            self._extend_running(plan)
        if self.speculation is not None and plan.decodes:
            self.speculation.extend(plan, self._decodes, self.cache)
        plan.excluded_decodes = len(self._decodes) - plan.decodes
        if plan.rows:
            plan.number = self._deferred_frees.start_plan()
            if self.cache.host is not None:
                plan.saves, plan.loads = self.cache.host.take_copies()
        return plan

    def advance(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Apply the result of a step: new tokens, filled pages, finished requests. Raises ValueError if it does not fit the plan."""
        if plan.samples != len(result.tokens):
            raise ValueError(f"the plan has {plan.samples} rows that sample, the result {len(result.tokens)} lists of tokens")
        for row, scores in zip(plan.rows, result.prompt_logprobs, strict=False):  # empty, or one entry per row
            row.request.score(scores)
        if plan.pools:
            for row in plan.rows:
                if row.request.pool is not None and row.request.id in result.pooled:
                    row.request.pool.add(result.pooled[row.request.id], row.end)
        self._leave_fast_path(result.endings)
        self._deferred_frees.finish_plan(plan.number)
        outputs = self._advance_rows(plan, result) if result.logprobs else self._advance_fast(plan, result)
        if (
            self.chunk_sizer is not None and not plan.scores
        ):  # the head ran on the whole prompt, so the time says nothing about other prompts
            self.chunk_sizer.observe(plan.costs, result.seconds)
        if self.speculation is not None:
            self.speculation.observe(plan, result)
        self.stats.record_step(plan.prefill_tokens, plan.decodes, result.seconds)
        return outputs

    def _leave_fast_path(self, names: Iterable[str]) -> None:
        """Send the next rows of these requests through the slow path: the step has more for them than one token."""
        for name in names:
            if name in self._requests:
                self._requests[name].fast_until = 0

    def _advance_rows(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        outputs = StepOutputs()
        sampled, logprobs = iter(result.tokens), iter(result.logprobs)
        for row in plan.rows:
            tokens, scores = (next(sampled), next(logprobs)) if row.samples else ((), ())
            self._advance_row(row, tokens, scores, outputs.full, result.endings)
        return outputs

    def _advance_fast(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Advance the rows as `_advance_rows` does, with a fast path for decodes that only add a token.

        The fast path calls only C functions until a block fills, and updates the counters once for all rows. This loop is most of the
        scheduler's cost of a step.
        """
        outputs = StepOutputs()
        rows, block, append_request, append_token = plan.rows, self.cache.block_tokens, outputs.decoded.append, outputs.tokens.append
        if plan.samples < len(rows):
            for row in [row for row in rows if not row.samples]:
                self._advance_row(row, (), (), outputs.full, result.endings)
            rows = [row for row in rows if row.samples]
        for row, tokens in zip(rows, result.tokens, strict=False):  # `advance` compared the lengths
            request = row.request
            computed = row.start + 1
            if computed < request.fast_until and tokens and (token := tokens[0]) not in request.stop_tokens:
                row.start = request.computed = computed
                request.tokens.append(token)
                append_request(request)
                append_token(token)
                if computed == request.page_end:
                    request.page_end += self._page_size
                    self._growing.append(request)
                    if not computed % block:
                        self._block_filled(request)
            else:
                self._advance_row(row, tokens, (), outputs.full, result.endings)
        self._count_output(len(outputs.tokens))
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
        if request.finish is not None:  # aborted during its step
            return
        lease = lease_of(request)
        if row.samples:
            end_reason = endings.get(request.id) if endings else None
            if tokens or end_reason is not None:
                outputs.append(self._take_tokens(request, tokens, logprobs, end_reason))
            if self.speculation is not None and row is request.row:
                self.speculation.finish_row(row, lease)
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
        """Prepare the decode row for the next step, and compute how long the fast path stays valid."""
        if request.row is None:
            request.row = Row(request, request.computed, 1, lease.pages, True)
            insort(self._decodes, request.row, key=_row_arrival)
        else:
            request.row.start = request.computed
        if len(request.tokens) > len(lease.pages) * self._page_size:
            self._growing.append(request)
        self.reserve.renew(request)
        request.page_end = (request.computed // self._page_size + 1) * self._page_size
        request.fast_until = 0 if request.awaiting_first_token else min(request.length_limit, request.reserved_end) - 1

    def _block_filled(self, request: Request) -> None:
        """Publish the computed pages of a request to the prefix cache.

        Called once per block, because the index cannot represent less: publishing per page would cost more without any benefit.
        """
        self.cache.publish(lease_of(request), request.tokens, request.computed)
        if self.waiting.fair is not None:
            self.waiting.fair.charge_output(request)

    def _count_output(self, tokens: int) -> None:
        self.reserve.consume(tokens)
        self.stats.output_tokens += tokens

    # Output

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """Return the blocks that the prefix cache stored or removed since the last call."""
        return self.cache.drain_events()

    def load(self) -> Load:
        """Return the current state, for the router and /metrics. O(1)."""
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
            preemptions=stats.preemptions,
            evicted_pages=self.cache.evicted_pages,
            preemption_recomputed_tokens=stats.recomputed_tokens,
            host=None if host is None else host.report(stats.host_cached_tokens),
            drafts=None if self.speculation is None else self.speculation.counts(),
        )

    # Planning

    def _extend_running(self, plan: StepPlan) -> None:
        """Add one token for each decoding request, and a page where it needs one. This comes first, so that decodes never wait."""
        if len(self._growing) > self.cache.available:
            self._preempt_for_pages()
        else:
            self.reserve.decay()
        if self._growing:
            self.cache.grow_each([lease_of(request) for request in self._growing])
            self._growing.clear()
        plan.rows = self._decodes.copy()
        plan.decodes = plan.samples = len(plan.rows)
        if self.chunk_sizer is not None:
            plan.decode_context = sum([row.start for row in plan.rows])

    def _preempt_for_pages(self) -> None:
        """Preempt running requests until the pages suffice for the other decodes."""
        while (victim := self.admission.pick_memory_victim()) is not None:
            self.reserve.raise_ratio(self.running)
            self._preempt(victim)
            self.waiting.add_preempted(victim)

    def _preempt_for_priority(self) -> None:
        """Preempt less urgent requests for the most urgent waiting one. Preempt none if it could not run even then."""
        urgent = self.waiting.most_urgent()
        for victim in self.admission.pick_priority_victims(urgent) if urgent is not None else ():
            victim.priority_preemptions += 1
            self._preempt(victim)
            self.waiting.add(victim)

    def _preempt(self, request: Request) -> None:
        """Take the pages of a running request. Its published pages stay cached until they are evicted."""
        self._stop_running(request)
        release(request)
        self.stats.preemptions += 1
        request.preemptions += 1
        request.lost = request.computed
        request.computed = request.cached = 0

    def _add_prefill(self, plan: StepPlan) -> None:
        """Add the next chunk of the partly prefilled request, then admissions. The chunk always fits: admission leased its pages."""
        prefill_budget = (
            None
            if self.chunk_sizer is None
            else self.chunk_sizer.prefill_budget(plan.decodes, plan.decode_context, self.stats.prefill_rate)
        )
        budget = StepBudget(self.config, self._page_size, plan.decodes, prefill_budget, 0 if self._decodes else self.idle_prefill)
        if self.chunked_req is not None:
            if self.chunked_req.scoring and plan.decodes:
                self._exclude_decodes = True
                return
            self._prefill(self.chunked_req, plan, budget)
        if len(self.waiting):
            self._admit_waiting(plan, budget)
        plan.prefill_tokens, plan.prefill_work = budget.spent, budget.work

    def _admit_waiting(self, plan: StepPlan, budget: StepBudget) -> None:
        """Admit waiting requests in policy order while tokens and pages last."""
        self.waiting.refresh()
        if len(self.running) >= self.config.max_num_seqs or budget.left <= 0:
            return
        if not self.running:
            self.reserve.reset()
        with closing(self.waiting.candidates()) as candidates:
            for request in candidates:
                if len(self.running) >= self.config.max_num_seqs:
                    return
                assert request.prefix_match is not None, "candidates are waiting requests"
                node = self.cache.match(request.prefix_match)
                cached = node.depth * self._page_size
                if not budget.cut(len(request.tokens) - cached, cached):
                    return
                if self.admission.missing_pages(request, node) <= 0:
                    if request.scoring and plan.decodes:
                        self._exclude_decodes = True
                        return
                    self._admit(request, node)
                    self._prefill(request, plan, budget)

    def _admit(self, request: Request, node: Node) -> None:
        """Lease pages for all known tokens of a request, and share the cached ones."""
        request.lease = self.cache.attach(node)  # before the match is untracked: one of the two must keep the tree
        self.waiting.remove_admitted(request)
        self.cache.grow(request.lease, len(request.tokens))
        request.cached = request.computed = node.depth * self._page_size
        request.awaiting_first_token = True
        if request.first_cached is None:
            request.first_cached = request.cached
            request.first_loaded = request.lease.loaded * self._page_size
            self.stats.host_cached_tokens += request.first_loaded
            self.stats.prompt_tokens += request.prompt_length
            self.stats.cached_tokens += request.cached
            if self.waiting.fair is not None:
                self.waiting.fair.charge_prompt(request)
        else:
            self.stats.recomputed_tokens += max(request.lost - request.cached, 0)
        insort(self.running, request, key=_arrival)

    def _prefill(self, request: Request, plan: StepPlan, budget: StepBudget) -> None:
        """Add as much of the request as the budget allows. An incomplete request becomes `chunked_req` and reserves no output yet."""
        count = budget.cut(request.uncomputed, request.computed)
        budget.spend(count, request.computed)
        is_whole = count == request.uncomputed
        if is_whole:
            self.chunked_req = None if request is self.chunked_req else self.chunked_req
            self.reserve.add(request)
        else:
            assert self.chunked_req in (None, request), "one partly prefilled request at a time"
            self.chunked_req = request
            budget.left = 0  # the tokens lost to page rounding stay unused: a second prompt would be cut too
        lease, end = lease_of(request), request.computed + count
        samples = is_whole and request.pool is None
        published_end = end - 1 if samples else end  # the last position is computed again if its token is late
        if 0 < self.config.dedupe_tokens <= published_end:
            self.cache.insert_pending(lease, request.tokens, published_end)
        plan.samples += samples
        plan.pools += bool(request.to_pool(request.computed, end))
        plan.scores += bool(request.to_score(request.computed, end))
        insort(plan.rows, Row(request, request.computed, count, lease.pages, samples), key=_row_arrival)

    # Results

    def _take_tokens(
        self, request: Request, tokens: Sequence[int], logprobs: tuple[TokenLogprobs, ...], end_reason: str | None = None
    ) -> Output:
        """Append sampled tokens until one ends the request. Only this method decides how a request finishes by its tokens.

        `end_reason`: not None if the grammar ends after these tokens. A non-empty value is the reason of a failure.
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
        if end_reason is not None and taken == len(tokens) and stop_token is None:
            request.finish = "error" if end_reason else "stop"
        self._count_output(taken)
        request.awaiting_first_token = request.awaiting_first_token and not taken
        text, cached = token_bytes(tokens[:taken]), request.first_cached or 0
        return Output(request.id, text, cached, request.finish, stop_token, end_reason or "", logprobs[:taken], None, request.take_scores())

    def _finish(self, request: Request) -> None:
        del self._requests[request.id]
        self._stop_running(request)
        self._deferred_frees.add(request)

    def _stop_running(self, request: Request) -> None:
        """Remove a request from the running ones, and publish the pages that it filled."""
        self.cache.publish(lease_of(request), request.tokens, request.computed)
        del self.running[bisect_left(self.running, request.arrival, key=_arrival)]
        if self.waiting.fair is not None:
            self.waiting.fair.charge_output(request)
        self.reserve.drop(request)
        request.fast_until = 0
        if request.row is not None:
            del self._decodes[bisect_left(self._decodes, request.arrival, key=_row_arrival)]
            request.row = None
        if request in self._growing:
            self._growing.remove(request)
        if request is self.chunked_req:
            self.chunked_req = None


_arrival, _row_arrival = attrgetter("arrival"), attrgetter("request.arrival")

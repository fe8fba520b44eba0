"""The scheduler: chooses which tokens of which requests the next step computes. Pure bookkeeping: no torch, no clock, no I/O."""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter

from msgspec.structs import replace

from fairlead_worker.cache.grouped import GroupedPrefixCache
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.cache.states import StatePrefixCache
from fairlead_worker.ipc.messages import Load, Output, Submit, TokenLogprobs
from fairlead_worker.scheduler.admission_control import AdmissionControl, is_ahead
from fairlead_worker.scheduler.background import Urgency, background_budget
from fairlead_worker.scheduler.budget import OutputReserve, StepBudget, idle_tokens
from fairlead_worker.scheduler.chunk_sizer import ChunkSizer
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.decode_batch import DecodeBatch
from fairlead_worker.scheduler.deferred_frees import DeferredFrees, release
from fairlead_worker.scheduler.plan import Row, StepPlan, StepResult
from fairlead_worker.scheduler.prefill import NO_PREFILL, Prefill, PrefillStep
from fairlead_worker.scheduler.queue.waiting_queue import WaitingQueue
from fairlead_worker.scheduler.request import Request, by_arrival, lease_of
from fairlead_worker.scheduler.speculation import Speculation
from fairlead_worker.scheduler.stats import EngineStats
from fairlead_worker.scheduler.step_outputs import StepOutputs, append_tokens
from fairlead_worker.scheduler.validation import InvalidRequest, refusal, validate

_row_arrival = attrgetter("request.arrival")


class Scheduler:
    """Plans steps over waiting and running requests.

    Call `submit` and `abort` at any time. For each step, call `plan`, run the plan, and pass its result to `advance`.

    A request waits (no pages, in `waiting`) or runs (a lease, in `running`, by arrival). Its progress decides whether it prefills
    (`Prefill`) or decodes (`DecodeBatch`).
    """

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        self.config = config
        self.cache = cache
        self._groups = cache if isinstance(cache, GroupedPrefixCache) else None
        self._states = cache if isinstance(cache, StatePrefixCache) else None
        self.running: list[Request] = []
        self.stats = EngineStats(config.chunked_prefill_size if config.chunked_prefill_size > 0 else config.max_prefill_tokens)
        self.reserve = OutputReserve(config)
        self.batch = DecodeBatch(cache, self.reserve)
        self.admission = AdmissionControl(config, cache, self.reserve, self.running, self.batch.growing)
        self.waiting = WaitingQueue(config, cache, self.admission.has_share)
        self.urgency = Urgency()
        self.prefill = Prefill(config, cache, self.waiting, self.running, self.reserve, self.admission, self.stats, self.urgency)
        self.chunk_sizer = ChunkSizer(config, cache.page_size) if config.itl_target_ms > 0 else None
        self.speculation = Speculation(config) if config.speculative_method != "none" else None
        self.deferred_frees = DeferredFrees()
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        """Requests accepted so far."""

    # Input

    def submit(self, message: Submit) -> Output | None:
        """Accept a request. Return a refusal if the request could never run here."""
        if message.id in self._requests:
            return refusal(message.id, f"a request with the id {message.id!r} already exists")
        try:
            request = validate(message, self._arrivals, self.config, self.cache.longest, self.cache.page_size)
        except InvalidRequest as error:
            return refusal(message.id, str(error))
        self._arrivals += 1
        self._requests[request.id] = request
        self.urgency.record(request.submit.priority, self.stats.steps)
        self.waiting.add(request)
        return None

    def abort(self, request_id: str) -> Output | None:
        """Drop a request in any state and ignore unknown ids. Its pages become free now, or when the step in flight ends."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.finish = "abort"
        if request.lease is None:
            self.waiting.remove(request)
            self._forget(request)
        else:
            self.finish(request)
        history = request.history
        computed = max(history.lost, request.computed) - history.reported_cached
        return Output(request.id, b"", history.reported_cached, "abort", computed_tokens=computed, mask_seconds=request.mask_seconds)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._requests

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that wait, without cached ones."""
        return self.waiting.tokens + self.prefill.backlog_tokens

    # Step

    def plan(self) -> StepPlan:
        """Choose the work of one step: decodes first, then the open chunk, then admissions, within the token and page budget.

        With mixing off, a step holds the prefill if there is any, and else the decodes. Decodes come first, then prompts by arrival,
        because a backend plans only leading ones as decodes. An empty plan means that there is nothing to do.
        """
        self._preempt_for_priority()
        is_mixed = self.config.enable_mixed_chunk
        decodes = self._extend_decodes() if is_mixed else []
        prefill = self.prefill.plan(self._make_budget(decodes)) if self.prefill.is_pending else NO_PREFILL
        self.waiting.promise()
        if not is_mixed and not prefill.rows:
            decodes = self._extend_decodes()
        if self.speculation is not None:
            decodes = self.speculation.draft(decodes, prefill.tokens, self.cache)
        return self._make_plan(decodes, prefill)

    def _make_budget(self, decodes: Sequence[Row]) -> StepBudget:
        """Return the budget for prefill beside these decodes."""
        prefill_budget = None
        if self.chunk_sizer is not None:
            prefill_budget = self.chunk_sizer.prefill_budget(len(decodes), self._context(decodes), self.backlog_tokens, self.stats)
        idle = 0 if self.batch.requests else idle_tokens(self.config, self.stats.prefill_rate)
        background = background_budget(self.stats, self.chunk_sizer, self.cache.page_size, self.config.max_prefill_tokens)
        return StepBudget(self.config, self.cache.page_size, len(decodes), prefill_budget, idle, background)

    def _make_plan(self, decodes: list[Row], prefill: PrefillStep) -> StepPlan:
        if not decodes and not prefill.rows:
            return StepPlan()
        rows = [*decodes, *sorted(prefill.rows, key=_row_arrival)]
        samples, scores, pools = len(decodes), 0, 0
        for row in prefill.rows:
            samples += row.samples
            scores += bool(row.request.to_score(row.start, row.end))
            pools += bool(row.request.to_pool(row.start, row.end))
        if self._states is not None:
            rows = [replace(row, state=self._states.plan_row(lease_of(row.request), row.start, row.end)) for row in rows]
        saves, loads = self.cache.host.take_copies() if self.cache.host is not None else ((), ())
        return StepPlan(
            rows=tuple(rows),
            prefill_tokens=prefill.tokens,
            decodes=len(decodes),
            excluded_decodes=len(self.batch.requests) - len(decodes),
            prefill_work=prefill.work,
            decode_context=self._context(decodes),
            samples=samples,
            scores=scores,
            pools=pools,
            drafted=sum([row.count - 1 for row in decodes]) if self.speculation is not None else 0,
            number=self.deferred_frees.start_plan(),
            saves=saves,
            loads=loads,
        )

    def _context(self, decodes: Sequence[Row]) -> int:
        """Return the lengths of the decodes, summed; 0 if the chunk size does not depend on them."""
        return sum([row.count * row.start for row in decodes]) if self.chunk_sizer is not None else 0

    def advance(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Apply the result of a step: new tokens, filled pages, finished requests. Raises ValueError if it does not fit the plan."""
        if plan.samples != len(result.tokens):
            raise ValueError(f"the plan has {plan.samples} rows that sample, the result {len(result.tokens)} lists of tokens")
        plan = plan if result.executed is None else result.executed
        if plan.scores or plan.pools:
            self._store_prompt_results(plan, result)
        self.begin_advance(plan, result)
        outputs, rows = StepOutputs(), plan.rows
        advance_row = partial(self._advance_row, outputs.full, result.endings)
        if plan.samples < len(rows):
            for row in rows:
                if not row.samples:
                    advance_row(row, (), ())
            rows = [row for row in rows if row.samples]
        self.batch.advance_unread(rows)
        self.batch.read_tokens(rows, result, outputs, advance_row, self.publish)
        self.record_step(plan, result, outputs)
        return outputs

    def _store_prompt_results(self, plan: StepPlan, result: StepResult) -> None:
        """Store prompt logprobs and pooled states with their requests."""
        for row, logprobs in zip(plan.rows, result.prompt_logprobs, strict=False):  # empty, or one entry per row
            if row.request.prompt_logprobs is not None:
                row.request.prompt_logprobs.add(logprobs)
        for row in plan.rows:
            if row.request.pool is not None and row.request.id in result.pooled:
                row.request.pool.add(result.pooled[row.request.id], row.end)

    def _advance_row(
        self,
        outputs: list[Output],
        endings: Mapping[str, str],
        row: Row,
        tokens: Sequence[int],
        logprobs: tuple[TokenLogprobs, ...],
    ) -> None:
        request = row.request
        if request.finish is not None:  # aborted during its step
            return
        self.batch.forget_unread(request)
        if row.samples:
            end_reason = endings.get(request.id) if endings else None
            if tokens or end_reason is not None:
                outputs.append(self.take_tokens(request, tokens, logprobs, end_reason))
            if self.speculation is not None and request in self.batch:
                self.speculation.finish_row(row)
        computed = request.computed = len(request.tokens) - 1 if row.samples else row.end
        if self._states is not None:
            self._states.settle(lease_of(request), row.start, computed)
        if request.pool is not None and computed == len(request.tokens):
            request.finish = "stop"
            cached, vector = request.history.reported_cached, request.pool.embedding()
            outputs.append(Output(request.id, b"", cached, "stop", embedding=vector, computed_tokens=computed - cached))
        if request.finish is not None:
            self.finish(request)
            return
        block = self.cache.block_tokens
        if computed // block > row.start // block or (row.count > 1 and request not in self.batch):
            self.publish(request)
        if row.samples:
            self.batch.set_next(request)

    # Parts of `advance`, also for steps launched ahead

    def begin_advance(self, plan: StepPlan, result: StepResult) -> None:
        """Free the pages that waited for this plan. The rows whose grammar ends take the slow path."""
        if result.endings:
            for name in result.endings:
                if name in self._requests:
                    self._requests[name].fast_until = 0
        self.deferred_frees.finish_plan(plan.number)

    def take_tokens(self, request: Request, tokens: Sequence[int], logprobs: tuple[TokenLogprobs, ...], end_reason: str | None) -> Output:
        """Append sampled tokens until one ends the request, and count them."""
        before = len(request.tokens)
        output = append_tokens(request, tokens, logprobs, end_reason)
        self.reserve.consume(len(request.tokens) - before)
        self.stats.output_tokens += len(request.tokens) - before
        return output

    def publish(self, request: Request) -> None:
        """Publish the computed pages of a request to the prefix cache.

        Called once per block, because the index cannot represent less: publishing per page would cost more without any benefit.
        """
        if self.config.keeps_kv:
            self.cache.publish(lease_of(request), request.tokens, request.computed)
            if self._groups is not None and request.promised is not None and not self._groups.is_shown(lease_of(request)):
                # Pages behind its window were evicted, and it does not compute them again.
                promised, request.promised = request.promised, None
                self._withdraw(request, promised)

    def finish(self, request: Request) -> None:
        """Remove a running request that ended. Its pages become free now, or when the step in flight ends."""
        self._stop_running(request)
        self.deferred_frees.add(request)
        self._forget(request)

    def record_step(self, plan: StepPlan, result: StepResult, outputs: StepOutputs) -> None:
        """Count the step, and learn from its time."""
        if self.chunk_sizer is not None and not plan.scores:
            # With scores, the head ran on the whole prompt, so the time says nothing about other prompts.
            self.chunk_sizer.observe(plan.costs, result.seconds)
        if self.speculation is not None:
            self.speculation.observe(plan, result)
        self.stats.output_tokens += len(outputs.tokens)
        self.stats.record_step(plan.prefill_tokens, plan.decodes, result.seconds)

    # Running requests

    def _extend_decodes(self) -> list[Row]:
        """Return a row of one token for each decoding request, and preempt if pages run out. This comes first: decodes never wait."""
        if len(self.batch.growing) > self.cache.available:
            self._preempt_for_pages()
        else:
            self.reserve.decay()
        return self.batch.extend()

    def _preempt_for_pages(self) -> None:
        """Preempt running requests until the pages suffice for the other decodes."""
        while (victim := self.admission.pick_memory_victim()) is not None:
            self.reserve.raise_ratio(self.running)
            self.preempt(victim)
            self.waiting.add(victim, lost_pages=True)

    def _preempt_for_priority(self) -> None:
        """Preempt less urgent requests for the most urgent waiting one. Preempt none if it could not run even then."""
        for victim in self.priority_victims():
            if victim is not self.prefill.chunked_req or not is_ahead(victim):
                victim.history.priority_preemptions += 1
            self.preempt(victim)
            self.waiting.add(victim)

    def priority_victims(self) -> list[Request]:
        """Return the running requests that the next plan preempts for a more urgent one."""
        urgent = self.waiting.most_urgent()
        if urgent is None:
            return []
        victims = self.admission.pick_priority_victims(urgent, self.prefill.chunked_req)
        # The one that is due goes before the urgent one, but the partly prefilled request would go before both.
        return [victim for victim in victims if victim is self.prefill.chunked_req] if self.waiting.has_due else victims

    def preempt(self, request: Request) -> None:
        """Take the pages of a running request. Its published pages stay cached until they are evicted. The caller adds it to `waiting`."""
        self._stop_running(request)
        release(request)
        self.stats.preemptions += 1
        history = request.history
        history.preemptions += 1
        history.lost, history.cached, request.computed = request.computed, 0, 0

    def _stop_running(self, request: Request) -> None:
        """Remove a request from the running ones, and publish the pages that it filled."""
        self.publish(request)
        if self._states is not None:
            self._states.end(lease_of(request))
        del self.running[bisect_left(self.running, request.arrival, key=by_arrival)]
        self.admission.end(request)
        self.reserve.drop(request)
        self.batch.remove(request)
        self.prefill.drop(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.id]
        if request.promised is not None:
            self._withdraw(request, request.promised)
        if self.speculation is not None:
            self.speculation.forget(request)

    def _withdraw(self, request: Request, promised: "array[int]") -> None:
        """Stop showing blocks to the index that this request does not compute any more."""
        shows_all = self._groups is None and self._states is None
        if shows_all and request.computed >= len(promised) * self.cache.block_tokens:
            self.cache.withdraw(promised, None)
            return
        match = self.cache.track(request.submit.root, request.tokens, request.reusable, bool(request.submit.adapter))
        self.cache.withdraw(promised, match)
        self.cache.untrack(match)

    # Output

    def load(self) -> Load:
        """Return the current state, for the router and /metrics. O(1)."""
        stats, cache = self.stats, self.cache
        pool, host = cache.pool, cache.host
        return Load(
            running=len(self.running),
            waiting=len(self.waiting),
            backlog_tokens=self.backlog_tokens,
            prefill_rate=stats.prefill_rate,
            step_seconds=stats.step_seconds(is_running=bool(self.running)),
            pages_total=pool.total // cache.units,
            pages_free=cache.available,
            pages_cached=pool.cached // cache.units,
            steps=stats.steps,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            output_tokens=stats.output_tokens,
            preemptions=stats.preemptions,
            evicted_pages=cache.evicted_pages // cache.units,
            preemption_recomputed_tokens=stats.recomputed_tokens,
            host=None if host is None else host.report(stats.host_cached_tokens, cache.units),
            drafts=None if self.speculation is None else self.speculation.counts(),
        )

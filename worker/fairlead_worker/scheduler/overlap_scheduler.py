"""A scheduler that plans a step while the step before it runs. It assumes that each row of the running step adds one token.

Call `advance_placeholder` with a launched plan, `plan` the next step, then `reconcile` the first plan with its tokens. Until then the last
token of a request is a placeholder. Only its position is used: the device fills in the real token of the next step's input.

`reconcile` corrects wrong assumptions. If a request ended, or its token was late, its row in the step launched meanwhile is discarded.
Its pages become free when that step ends (`DeferredFrees`). All steps run in order on one stream, so each step sees the writes of the
steps before it.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat

from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.messages import Output, TokenLogprobs
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.plan import Row, StepPlan, StepResult
from fairlead_worker.scheduler.request import Request, lease_of
from fairlead_worker.scheduler.scheduler import Scheduler
from fairlead_worker.scheduler.step_outputs import StepOutputs

PLACEHOLDER = 0xFFFFFFFF
"""Placeholder in a request's tokens until the sampled token is read. No vocabulary has this id."""


class OverlapScheduler(Scheduler):
    """At most one plan is in flight when `plan` is called, and it has placeholders. `advance` serves steps run with none in flight."""

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        super().__init__(config, cache)
        self._placeholders: list[Request] = []
        """Requests whose tokens end with a placeholder, in plan order."""
        self._without_token: set[Request] = set()
        """Requests without a token in the latest reconciled plan (a grammar mask was late). Their rows in the next plan are void."""

    @property
    def can_plan_ahead(self) -> bool:
        """Whether `plan` may run with a plan in flight: no preemption is needed (it is decided by known tokens), and no speculation."""
        preempts = self.config.policy == "priority" and len(self.waiting) > 0
        return self.speculation is None and not preempts and len(self._growing) <= self.cache.available

    def plan(self) -> StepPlan:
        """Choose the work of one step, as `Scheduler.plan` does."""
        self._without_token.clear()  # the plan was reconciled before this one, so there are no void rows
        return super().plan()

    def drop_finished(self, plan: StepPlan) -> None:
        """Remove the rows of finished requests from a plan that has not run yet.

        They finished when the plan before it was reconciled. A request that ended without a token has nothing to compute.
        """
        ended = [row for row in plan.rows if row.request.finish is not None]
        if ended:
            plan.rows = [row for row in plan.rows if row.request.finish is None]
            plan.samples -= len(ended)
            plan.decodes -= len(ended)

    def rows_to_sample(self, plan: StepPlan) -> list[Row]:
        """Return the rows of a launched plan that need a token. Call it after the plan before it is reconciled."""
        return [row for row in plan.rows if row.samples and row.request.finish is None and row.request not in self._without_token]

    def advance_placeholder(self, plan: StepPlan, awaited: list[Row]) -> None:
        """Advance the plan's requests as if the step were over. The requests of the `awaited` rows get a placeholder token each.

        A request that reaches its length limit with the placeholder is not planned again.
        """
        self._placeholders = [row.request for row in awaited]
        fast_tokens = 0
        for row in plan.rows:  # the fast path for decodes, as in `_advance_fast`
            request, computed = row.request, row.start + 1
            if computed < request.fast_until:
                row.start = request.computed = computed
                request.tokens.append(PLACEHOLDER)
                fast_tokens += 1
                if computed == request.page_end:
                    request.page_end += self._page_size
                    self._growing.append(request)
            elif request.finish is None and request not in self._without_token:
                self._advance_placeholder_row(row)
        self.reserve.consume(fast_tokens)
        self._without_token.clear()

    def reconcile(self, plan: StepPlan, read: Callable[[], StepResult]) -> StepOutputs:
        """Replace the placeholders of a plan by its sampled tokens, as `advance` does for a plan without placeholders.

        `read` waits for the result, which has the tokens of the awaited rows only. It is called after the placeholders are removed, so it
        may read the requests. Raises ValueError if the number of tokens is wrong.
        """
        awaited, self._placeholders = self._placeholders, []
        live = [request for request in awaited if request.finish is None]  # aborted requests keep the placeholder
        for request in live:
            request.tokens.pop()
        self.reserve.consume(-len(live))
        result = read()
        if len(result.tokens) != len(awaited):
            raise ValueError(f"the plan has {len(awaited)} rows that wait for tokens, the result {len(result.tokens)} lists of tokens")
        self._leave_fast_path(result.endings)
        self._deferred_frees.finish_plan(plan.number)
        outputs = StepOutputs()
        block, append_request, append_token = self.cache.block_tokens, outputs.decoded.append, outputs.tokens.append
        for request, tokens, logprobs in zip(awaited, result.tokens, result.logprobs or repeat(()), strict=False):
            computed = request.computed
            if computed < request.fast_until and tokens and not logprobs and (token := tokens[0]) not in request.stop_tokens:
                request.tokens.append(token)
                append_request(request)
                append_token(token)
                if not computed % block:
                    self._block_filled(request)
            elif request.finish is None:  # else it was aborted during its step
                self._reconcile_row(request, tokens, logprobs, result.endings, outputs.full)
        self._count_output(len(outputs.tokens))
        if self.chunk_sizer is not None:
            self.chunk_sizer.observe(plan.costs, result.seconds)
        self.stats.record_step(plan.prefill_tokens, plan.decodes, result.seconds)
        return outputs

    def advance(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        self._without_token.clear()  # its rows were packed after they were moved back
        return super().advance(plan, result)

    def _advance_placeholder_row(self, row: Row) -> None:
        request, end = row.request, row.end
        lease = lease_of(request)
        # The last position of a sampling row is computed again if its token is late. Sharing it would show other requests two writes.
        self.cache.publish(lease, request.tokens, end - 1 if row.samples else end)
        request.computed = end
        if not row.samples:
            return
        request.tokens.append(PLACEHOLDER)
        self.reserve.consume(1)
        if len(request.tokens) < request.length_limit:
            self._decode_next(request, lease)
        elif request.row is not None:
            self._decodes.remove(request.row)
            request.row = None

    def _reconcile_row(
        self,
        request: Request,
        tokens: Sequence[int],
        logprobs: tuple[TokenLogprobs, ...],
        endings: Mapping[str, str],
        outputs: list[Output],
    ) -> None:
        end_reason = endings.get(request.id)
        if tokens or end_reason is not None:
            outputs.append(self._take_tokens(request, tokens, logprobs, end_reason))
        if not tokens:
            request.computed -= 1
        if request.finish is not None:
            self._finish(request)
        elif not tokens:
            self._retry_row(request)
        elif request.computed % self.cache.block_tokens == 0:
            self._block_filled(request)

    def _retry_row(self, request: Request) -> None:
        """Compute the position of a late token again, in the plan after the next one."""
        lease = lease_of(request)
        lease.trim(len(request.tokens))  # frees a page of the void row; the next write to it is ordered after the void row's
        if request in self._growing:
            self._growing.remove(request)
        self._decode_next(request, lease)
        self._without_token.add(request)
        request.fast_until = 0  # `advance_placeholder` must not advance it by the void row

"""Plans a step while the step before it runs. It assumes that each row of the running step adds one token.

Call `advance_unread` with a launched plan, `plan` the next step, then `reconcile` the first plan with its tokens. Until then a request has
an unread token (`Request.unread`). Only its position is used: the device fills in the token of the next step's input.

`reconcile` corrects wrong assumptions. If a request ended, or its token was late, its row in the step launched meanwhile is discarded.
Its pages become free when that step ends (`DeferredFrees`). All steps run in order on one stream, so each step sees the writes of the
steps before it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from fairlead_worker.ipc.messages import Output, TokenLogprobs
from fairlead_worker.scheduler.plan import Row, StepPlan, StepResult
from fairlead_worker.scheduler.request import Request, lease_of
from fairlead_worker.scheduler.scheduler import Scheduler
from fairlead_worker.scheduler.step_outputs import StepOutputs


class OverlapScheduler:
    """Uses a `Scheduler` with at most one plan in flight when `plan` is called, whose tokens are unread.

    `advance` serves steps run with none in flight.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._awaited: Sequence[Row] = ()
        """Rows of the plan in flight whose requests have an unread token."""
        self._without_token: set[Request] = set()
        """Requests without a token in the latest reconciled plan (a grammar mask was late). Their rows in the next plan are void."""

    @property
    def can_plan_ahead(self) -> bool:
        """Whether `plan` may run with a plan in flight: no preemption is needed (it is decided by known tokens), and no speculation."""
        scheduler = self._scheduler
        if scheduler.speculation is not None or len(scheduler.batch.growing) > scheduler.cache.available:
            return False
        return not scheduler.priority_victims()

    def plan(self) -> StepPlan:
        """Choose the work of one step, as `Scheduler.plan` does."""
        self._without_token.clear()  # the plan was reconciled before this one, so there are no void rows
        return self._scheduler.plan()

    def correct(self, plan: StepPlan) -> StepPlan:
        """Return a plan that has not run yet as the plan before it, reconciled meanwhile, leaves it.

        Rows of finished requests go: a request that ended without a token has nothing to compute. A request whose token was late computes
        its last position again.
        """
        late, rows = self._without_token, []
        for row in plan.rows:
            if row.request.finish is None:
                rows.append(replace(row, start=row.request.computed) if row.request in late else row)
        ended = len(plan.rows) - len(rows)
        return replace(plan, rows=tuple(rows), samples=plan.samples - ended, decodes=plan.decodes - ended)

    def rows_to_sample(self, plan: StepPlan) -> list[Row]:
        """Return the rows of a launched plan that need a token. Call it after the plan before it is reconciled."""
        return [row for row in plan.rows if row.samples and row.request.finish is None and row.request not in self._without_token]

    def advance_unread(self, plan: StepPlan, awaited: Sequence[Row]) -> None:
        """Advance the plan's requests as if the step were over. The requests of the `awaited` rows get an unread token each.

        A request that reaches its length limit with the unread token is not planned again.
        """
        self._awaited = awaited
        self._scheduler.batch.advance_unread(plan.rows, self._advance_unread_row)
        self._without_token.clear()

    def reconcile(self, plan: StepPlan, read: Callable[[], StepResult]) -> StepOutputs:
        """Add the sampled tokens of a plan whose tokens are unread, as `advance` does for other plans.

        `read` waits for the result, which has the tokens of the awaited rows only. Raises ValueError if the number of tokens is wrong.
        """
        scheduler, outputs = self._scheduler, StepOutputs()
        awaited, self._awaited = self._awaited, ()
        result = read()
        if len(result.tokens) != len(awaited):
            raise ValueError(f"the plan has {len(awaited)} rows that wait for tokens, the result {len(result.tokens)} lists of tokens")
        scheduler.begin_advance(plan, result)
        reconcile_row = partial(self._reconcile_row, outputs.full, result.endings)
        scheduler.batch.read_tokens(awaited, result, outputs, reconcile_row, scheduler.publish)
        scheduler.record_step(plan, result, outputs)
        return outputs

    def advance(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Apply the result of a step, as `Scheduler.advance` does."""
        self._without_token.clear()  # `correct` has moved their rows back
        return self._scheduler.advance(plan, result)

    def _advance_unread_row(self, row: Row) -> None:
        request, scheduler, end = row.request, self._scheduler, row.end
        if request.finish is not None or request in self._without_token:
            return
        # The last position of a sampling row is computed again if its token is late. Sharing it would show other requests two writes.
        scheduler.cache.publish(lease_of(request), request.tokens, end - 1 if row.samples else end)
        request.computed = end
        if not row.samples:
            return
        request.unread = 1
        scheduler.reserve.consume(1)
        if request.length < request.length_limit:
            scheduler.batch.set_next(request)
        else:
            scheduler.batch.remove(request)

    def _reconcile_row(
        self,
        outputs: list[Output],
        endings: Mapping[str, str],
        row: Row,
        tokens: Sequence[int],
        logprobs: tuple[TokenLogprobs, ...],
    ) -> None:
        request, scheduler = row.request, self._scheduler
        if request.finish is not None:  # aborted during its step
            return
        end_reason = endings.get(request.id)
        scheduler.batch.forget_unread(request)
        if tokens or end_reason is not None:
            outputs.append(scheduler.take_tokens(request, tokens, logprobs, end_reason))
        if not tokens:
            request.computed -= 1
        if request.finish is not None:
            scheduler.finish(request)
        elif not tokens:
            scheduler.batch.retry(request)
            self._without_token.add(request)
        elif request.computed % scheduler.cache.block_tokens == 0:
            scheduler.publish(request)

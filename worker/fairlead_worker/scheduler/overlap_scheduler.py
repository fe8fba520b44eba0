"""A scheduler that plans a step while the one before it runs: it takes for granted that each row of it brings one token and goes on.

`assume` a plan that was launched, `plan` the next one, then `settle` the first by its tokens. Until then the last of a request's tokens
is a stand-in, and nothing but its place is used: whoever packs the next step has the device put in the real one. What turns out otherwise
is put right here: the row of a request that has ended, or whose token did not come, is discarded from the step that was launched
meanwhile, and pages come back when that step is over (`Departed`). The order of work is one stream's: each step sees what the ones before
it have written.
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
"""In a request's tokens, for the one that is being computed: nobody's token."""


class OverlapScheduler(Scheduler):
    """At most one plan is out when `plan` is called, and it was assumed. `advance` still takes a step that was run with none out."""

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        super().__init__(config, cache)
        self._awaited: list[Request] = []
        """Whose tokens end in a stand-in, as of `assume`, in the order of the plan."""
        self._stalled: set[Request] = set()
        """Without a token in the plan settled last (a mask was late): their rows of the plan launched meanwhile are void."""

    @property
    def can_plan_ahead(self) -> bool:
        """Whether `plan` makes sense with a plan out: nobody has to lose pages for it (that is decided by known tokens alone), nobody
        guesses."""
        preempts = self.config.policy == "priority" and len(self.waiting) > 0
        return self.speculation is None and not preempts and len(self._growing) <= self.cache.available

    def plan(self, admits: bool = True, begins: int = 0) -> StepPlan:
        """As a scheduler's that looks at nothing ahead."""
        self._stalled.clear()  # settled with nothing planned meanwhile: there are no void rows
        return super().plan(admits, begins)

    def withdraw(self, plan: StepPlan) -> None:
        """Takes out of a plan that is still to be run who has ended when the one before it was settled. Of one that ended without a token
        there is nothing to compute."""
        ended = [row for row in plan.rows if row.request.finish is not None]
        if ended:
            plan.rows = [row for row in plan.rows if row.request.finish is None]
            plan.samples -= len(ended)
            plan.decodes -= len(ended)

    def awaited(self, plan: StepPlan) -> list[Row]:
        """Rows of a plan just launched from which a token is wanted, now that the one before it is settled."""
        return [row for row in plan.rows if row.samples and row.request.finish is None and row.request not in self._stalled]

    def assume(self, plan: StepPlan, awaited: list[Row]) -> None:
        """Moves the plan's requests on as if it were over, those of the `awaited` rows by a stand-in each. One that reaches its length
        thereby is in no further plan."""
        self._awaited = [row.request for row in awaited]
        quick = 0
        for row in plan.rows:  # as `_advance_quickly`: nearly nothing for a decode
            request, computed = row.request, row.start + 1
            if computed < request.alarm:
                row.start = request.computed = computed
                request.tokens.append(PLACEHOLDER)
                quick += 1
                if computed == request.page_end:
                    request.page_end += self._page_size
                    self._growing.append(request)
            elif request.finish is None and request not in self._stalled:
                self._assume_row(row)
        self.reserve.wrote(quick)
        self._stalled.clear()

    def settle(self, plan: StepPlan, read: Callable[[], StepResult]) -> StepOutputs:
        """As `advance`, for a plan that was assumed. `read` waits for its result, whose tokens are those of the rows awaited; it is called
        when the stand-ins are gone, so that it may look at the requests."""
        awaited, self._awaited = self._awaited, []
        live = [request for request in awaited if request.finish is None]  # who was aborted left with the stand-in
        for request in live:
            request.tokens.pop()
        self.reserve.wrote(-len(live))
        result = read()
        if len(result.tokens) != len(awaited):
            raise ValueError(f"the plan has {len(awaited)} rows that wait for tokens, the result {len(result.tokens)} lists of tokens")
        self._look_at(result.endings)
        self._deferred_frees.returned(plan.number)
        outputs = StepOutputs()
        block, decoded, took = self.cache.block_tokens, outputs.decoded.append, outputs.tokens.append
        for request, tokens, logprobs in zip(awaited, result.tokens, result.logprobs or repeat(()), strict=False):
            computed = request.computed
            if computed < request.alarm and tokens and not logprobs and (token := tokens[0]) not in request.stop_tokens:
                request.tokens.append(token)
                decoded(request)
                took(token)
                if not computed % block:
                    self._block_filled(request)
            elif request.finish is None:  # else aborted while its step ran
                self._settle_row(request, tokens, logprobs, result.endings, outputs.told)
        self._wrote(len(outputs.tokens))
        if self.chunk_sizer is not None:
            self.chunk_sizer.observe(plan.costs, result.seconds)
        self.stats.step(plan.prefill_tokens, plan.decodes, result.seconds)
        return outputs

    def advance(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        self._stalled.clear()  # its rows were packed when they had been moved back
        return super().advance(plan, result)

    def _assume_row(self, row: Row) -> None:
        request, end = row.request, row.end
        lease = lease_of(request)
        # The last position of a row that samples is computed again if its token does not come: other requests would see it written twice.
        self.cache.publish(lease, request.tokens, end - 1 if row.samples else end)
        request.computed = end
        if not row.samples:
            return
        request.tokens.append(PLACEHOLDER)
        self.reserve.wrote(1)
        if len(request.tokens) < request.length_limit:
            self._decode_next(request, lease)
        elif request.row is not None:
            self._decodes.remove(request.row)
            request.row = None

    def _settle_row(
        self,
        request: Request,
        tokens: Sequence[int],
        logprobs: tuple[TokenLogprobs, ...],
        endings: Mapping[str, str],
        outputs: list[Output],
    ) -> None:
        ending = endings.get(request.id)
        if tokens or ending is not None:
            outputs.append(self._take_tokens(request, tokens, logprobs, ending))
        if not tokens:
            request.computed -= 1
        if request.finish is not None:
            self._finish(request)
        elif not tokens:
            self._again(request)
        elif request.computed % self.cache.block_tokens == 0:
            self._block_filled(request)

    def _again(self, request: Request) -> None:
        """Its token did not come: the same position once more, in the next plan but one."""
        lease = lease_of(request)
        lease.trim(len(request.tokens))  # of the page that the void row has, if it has one: what is written there next comes behind it
        if request in self._growing:
            self._growing.remove(request)
        self._decode_next(request, lease)
        self._stalled.add(request)
        request.alarm = 0  # `assume` is not to move it on by the void row

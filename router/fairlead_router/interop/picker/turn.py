"""One picked request and what is counted for it, from the pick until Envoy says that the answer is over."""

from time import monotonic

from fairlead_router.errors import Headers
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.routing.canary_split import SplitPolicy
from fairlead_router.routing.policies import Choice, Policy, Wanted


class Turn:
    """A request counts at its worker as one of the proxy's does: its tokens until the answer begins, itself until the answer ends."""

    def __init__(self, table: WorkerTable, policy: Policy, metrics: Metrics, wanted: Wanted, choice: Choice) -> None:
        self._table, self._policy, self._metrics = table, policy, metrics
        self._wanted, self.choice = wanted, choice
        self._split = policy if isinstance(policy, SplitPolicy) else None
        self._pending = max(0, wanted.prompt_tokens - (choice.predicted or 0))
        self._since = monotonic()
        self._at = choice.worker
        self._at.in_flight += 1
        self._at.unanswered += 1
        self._at.pending_tokens += self._pending
        self._begun = self._over = False

    def began(self, status: int, headers: Headers, served: str) -> None:
        """The answer's head is there. `served` names the endpoint that Envoy got it from, where it says so; another than the first
        one picked means that Envoy could not use that."""
        if self._begun or self._over:
            return
        self._settle()
        said = dict(headers)
        first = self.choice.worker
        if served and served != first.address:
            first.suspect()
            self._missed(first)
            self._move(served)
        elif status in (502, 503, 504) and b"x-fairlead-pod" not in said:
            first.suspect()
            if b"x-fairlead-retry" not in said:
                first.breaker.failed()  # nobody answered: these are the gateway's own words
                self._missed(first)
        else:
            first.breaker.succeeded()
            if self._split is not None and b"x-fairlead-retry" not in said:
                self._split.began(first, status, self._since)
        self._metrics.ttfb.observe(monotonic() - self._since)
        cached = said.get(b"x-fairlead-cached-tokens", b"")
        if cached.isdigit() and self._at is first:
            self._metrics.compared(self.choice.predicted, int(cached))
            self._policy.answered(self._wanted, self.choice, int(cached))

    def over(self) -> None:
        """The answer has ended, or the gateway has hung up. May be said again."""
        if self._over:
            return
        self._over = True
        if not self._begun:
            self._settle()
        self._at.in_flight -= 1

    def _settle(self) -> None:
        self._begun = True
        self.choice.worker.unanswered -= 1
        self.choice.worker.pending_tokens -= self._pending
        self._policy.release(self.choice)

    def _missed(self, worker: Worker) -> None:
        """Count a request that had no answer there, where sides are compared."""
        if self._split is not None:
            self._split.failed(worker)

    def _move(self, address: str) -> None:
        served = self._table.get(address)
        if served is not None:
            self._at.in_flight -= 1
            self._at = served
            served.in_flight += 1

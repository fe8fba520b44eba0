"""Accounting of one picked request, from the pick until the end of its answer."""

from time import monotonic

from fairlead_router.errors import Headers
from fairlead_router.fleet.pending_prompt import PendingPrompt
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.routing.canary_split import CanaryPolicy
from fairlead_router.routing.policies import Choice, Policy, RoutingRequest


class PickSession:
    """Session of one request. As in the proxy, its tokens are pending until the answer begins, and it is in flight until its end."""

    def __init__(
        self, table: WorkerTable, policy: Policy, metrics: Metrics, request: RoutingRequest, choice: Choice, streams: bool
    ) -> None:
        self._table, self._policy, self._metrics = table, policy, metrics
        self._request, self.choice = request, choice
        self._canary = policy if isinstance(policy, CanaryPolicy) else None
        self._sent_at = monotonic()
        self._worker = choice.worker
        self._worker.in_flight += 1
        tokens = max(0, request.prompt_tokens - (choice.predicted or 0))
        self._prompt = PendingPrompt(choice.worker, tokens, streams, lambda: policy.release(choice))
        self._has_answer = self._has_ended = False

    def start_answer(self, status: int, headers: Headers, served: str) -> None:
        """Record the answer's head. `served`: the endpoint that Envoy got it from, if reported.

        An endpoint other than the first one picked means that Envoy could not use the first.
        """
        if self._has_answer or self._has_ended:
            return
        self._has_answer = True
        self._prompt.end()
        by_name = dict(headers)
        first = self.choice.worker
        if served and served != first.address:
            first.mark_unhealthy()
            self._record_no_answer(first)
            self._move(served)
        elif status in (502, 503, 504) and b"x-fairlead-pod" not in by_name:
            first.mark_unhealthy()
            if b"x-fairlead-retry" not in by_name:
                first.breaker.record_failure()  # no worker answered: this status is the gateway's own
                self._record_no_answer(first)
        else:
            first.breaker.record_success()
            if self._canary is not None and b"x-fairlead-retry" not in by_name:
                self._canary.record_head(first, status, self._sent_at)
        self._metrics.ttfb.observe(monotonic() - self._sent_at)
        cached = by_name.get(b"x-fairlead-cached-tokens", b"")
        if cached.isdigit() and self._worker is first:
            self._metrics.record_prediction(self.choice.predicted, int(cached))
            self._policy.record_answer(self._request, self.choice, int(cached))

    def end(self) -> None:
        """Record that the answer has ended or the gateway has disconnected. Idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        self._prompt.end()
        self._worker.in_flight -= 1

    def _record_no_answer(self, worker: Worker) -> None:
        """Count a request without an answer for the canary's comparison."""
        if self._canary is not None:
            self._canary.record_failure(worker)

    def _move(self, address: str) -> None:
        served = self._table.get(address)
        if served is not None:
            self._worker.in_flight -= 1
            self._worker = served
            served.in_flight += 1

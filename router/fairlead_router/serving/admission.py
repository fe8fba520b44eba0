"""Admission control: when a request may go to a worker.

Below saturation this compares two numbers. Above it, requests wait in two queues. A worker gets as much as it prefills in a second, or
four requests: so it never idles, and can choose the best cached of them. The others wait in the router's queue, which knows priorities,
tenants and work. The same queue holds requests while there is no worker. Best-effort requests have a queue of their own,
behind it.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from time import monotonic

import msgspec

from fairlead_index.score import CONSIDERED
from fairlead_router.config import RouterConfig
from fairlead_router.errors import SHUTTING_DOWN, ApiError, overloaded, unavailable
from fairlead_router.fleet.scale_up_status import ScaleUpStatus
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.metrics import Metrics, RefusalReason
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.serving.best_effort import BestEffortShare
from fairlead_router.serving.fair_queue import FairQueue, QueuedRequest
from fairlead_router.serving.slo_gate import ClassTerms, Predict, SloGate
from fairlead_router.supervision import supervise

AHEAD_SECONDS = 1.0
AHEAD_TOKENS = 16384
"""Budget of a worker that has not measured its prefill rate: two of its largest steps."""
AHEAD_REQUESTS = 4
HOLD_SECONDS, HOLD_WHILE_STARTING = 30.0, 600.0
"""Hold timeout without `--hold-timeout`: normally, and while workers are starting. OpenAI's clients wait ten minutes. A stalled model load
does not count as starting, because its probe restarts the pod, which then is a fault."""
SCARCE_PAGES = 0.05
"""Share of free KV pages below which a worker's queued requests wait for pages, not for prefill."""
MAX_QUEUE_BYTES = 128 << 20
"""Of the bodies of queued requests."""
KEEP_ALIVE_SECONDS = 5.0
"""Between the comments on a stream that is held."""
RECHECK_SECONDS = 1.0
"""Polling interval of the queue: the index may learn of a worker, or a circuit breaker may close, without an event here."""


class Ticket(QueuedRequest, eq=False, kw_only=True):
    """Place of one request in the queue."""

    cost: float = 0.0
    """Expected prompt and output tokens."""
    keep_alive: Callable[[], None] | None = None
    """Sends a keep-alive comment to the client of a held stream; None for other answers."""
    terms: ClassTerms | None = None
    """The request's service class; None: it has none."""
    request: RoutingRequest = msgspec.field(default_factory=RoutingRequest)
    last_keep_alive: float = msgspec.field(default_factory=monotonic)
    """Time of the last keep-alive, at first of the arrival. A requeue does not delay the next one."""
    queued_at: float = msgspec.field(default_factory=monotonic)
    retried_at: int = -1
    """Version of the worker table when the request had its turn and no worker could take it."""
    turn: "asyncio.Future[None] | None" = None
    is_granted: bool = False
    """The request may choose a worker and has not been sent yet."""
    is_charged: bool = False
    """The tenant's fair-queue counter includes this request."""
    has_answer: bool = True
    """No worker has yet to begin the answer: it has begun, or the request was not granted."""

    @property
    def is_best_effort(self) -> bool:
        return self.terms is not None and self.terms.service_class.is_best_effort


def admissible_tokens(worker: Worker) -> float:
    """Return the prompt tokens that the worker should get now."""
    load = worker.load
    few = float(worker.pending_prompts < AHEAD_REQUESTS)
    seats = worker.max_running > 0 and load.running >= worker.max_running
    if load.waiting and (seats or load.pages_free < SCARCE_PAGES * load.pages_total):
        return few  # its queue waits for running requests to end, so more prompts would only lengthen it
    return max(few, (AHEAD_SECONDS * load.prefill_rate or AHEAD_TOKENS) - worker.pending_tokens)


class Admission:
    """Admission queue. Call `enter`, then `record_sent` at each attempt, `record_answer` at the first byte, and `leave` in every case."""

    def __init__(
        self, config: RouterConfig, table: WorkerTable, metrics: Metrics, scale_up: ScaleUpStatus, gate: SloGate, predict: Predict
    ) -> None:
        self._config, self._table, self._metrics, self._scale_up, self._gate = config, table, metrics, scale_up, gate
        self._predict = predict
        self._queue: FairQueue[Ticket] = FairQueue()
        self._best_effort: FairQueue[Ticket] = FairQueue()
        self._share = BestEffortShare()
        self._spare_timer: asyncio.TimerHandle | None = None
        self._numbers = itertools.count()
        self._granted = 0
        """Prompt tokens of granted requests that have not been sent."""
        self._granted_best_effort = 0
        """Number of best-effort requests among them."""
        self._num_unanswered = 0
        self._table_version = 0
        """Counts the wake-ups of `_watch`. Each of them may have found other workers than before."""
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False
        metrics.watch_queue(lambda: self.queued()[0], self._queued_bytes, self._num_waiting_for_worker)

    async def enter(self, ticket: Ticket) -> None:
        """Wait until the request is admitted. Raises ApiError: 429 when the wait or the queue is too long, 503 without workers."""
        ticket.number = next(self._numbers)
        if ticket.terms is not None:
            self._estimate_work(ticket)
            self._gate.check(ticket.terms, self._queue.work_ahead(ticket) + self._granted)
        if ticket.is_best_effort:
            await self._wait(ticket)
            return
        if not self._has_runnable and (self._num_unanswered < AHEAD_REQUESTS or self._has_capacity(self._table.usable(), none=True)):
            self._grant(ticket)
            return
        await self._wait(ticket)

    async def requeue(self, ticket: Ticket) -> None:
        """Queue the request again, at its old place, because no worker could take it."""
        self._revoke(ticket)
        ticket.retried_at = self._table_version
        if not ticket.had_turn:
            ticket.had_turn, ticket.queued_at = True, monotonic()
        await self._wait(ticket)

    def record_sent(self, ticket: Ticket) -> None:
        """Record that the request was sent. From now on the worker's own load includes it."""
        if ticket.is_granted:
            ticket.is_granted = False
            self._granted -= ticket.tokens
            self._granted_best_effort -= ticket.is_best_effort
            if self._best_effort and ticket.is_best_effort and self._has_spare_worker():
                self._admit_waiting()

    def record_answer(self, ticket: Ticket) -> None:
        """Record that the answer has begun, and admit waiting requests."""
        self._revoke(ticket)
        if self._queue or self._best_effort:
            self._admit_waiting()

    leave = record_answer

    def unsuitable_workers(self, ticket: Ticket) -> set[tuple[str, int]]:
        """Return the workers that the request should not go to, as (address, generation)."""
        return self._gate.unsuitable(ticket.terms) if ticket.terms is not None else set()

    def drain(self, seconds: float) -> None:
        """Reject the requests that still wait in `seconds`, while clients can still retry at another router."""
        asyncio.get_running_loop().call_later(seconds, self._reject_waiting)

    def expected_ttft(self, ticket: Ticket, workers: Sequence[Worker]) -> float:
        """Return the expected time to first token, seconds."""
        ahead = self._queue.work_ahead(ticket) + (self._best_effort.work_ahead(ticket) if ticket.is_best_effort else 0)
        rate, now = sum(worker.rate for worker in workers), monotonic()
        return ahead / rate + min(worker.expected_ttft(now, ticket.work) for worker in workers)

    def queued(self) -> tuple[int, int]:
        """Return the number of queued requests, and the prompt tokens of those that are not best effort."""
        return len(self._queue) + len(self._best_effort), self._queue.total.tokens

    # Internals

    def _estimate_work(self, ticket: Ticket) -> None:
        """Set the request's uncached tokens. Unknown ones count as uncached: without a mirror, all."""
        if not ticket.work:
            ticket.work = max(1, ticket.tokens - max(self._predict(ticket.request).values(), default=0))

    def _queued_bytes(self) -> int:
        return self._queue.total.size + self._best_effort.total.size

    def _num_waiting_for_worker(self) -> int:
        """Return how many queued requests wait for a worker rather than for admission."""
        waiting = itertools.chain(self._queue, self._best_effort)
        return sum(ticket.had_turn for ticket in waiting) if self._table.any_usable() else self.queued()[0]

    @property
    def _has_runnable(self) -> bool:
        """Whether a queued request must go before a new one.

        Requests that no current worker can serve, such as those for a missing adapter, do not block others.
        """
        return bool(self._queue) and (any(map(self._may_retry, self._queue)) or not self._table.any_usable())

    def _may_retry(self, ticket: Ticket) -> bool:
        """Whether the workers may have changed since the request last found none."""
        return ticket.retried_at != self._table_version

    @property
    def _hold_timeout(self) -> float:
        """Longest wait for a worker, seconds."""
        if self._config.hold_timeout is not None:
            return self._config.hold_timeout
        return HOLD_WHILE_STARTING if self._scale_up.is_advancing else HOLD_SECONDS

    async def _wait(self, ticket: Ticket) -> None:
        self._estimate_work(ticket)
        self._check_queue_limits(ticket)
        turn = ticket.turn = asyncio.get_running_loop().create_future()
        queue = self._queue_of(ticket)
        queue.push(ticket)
        if self._watching is None or self._watching.done():
            self._watching = supervise("queue", self._watch, self._metrics.task_failures)
        if ticket.is_best_effort and not ticket.had_turn:
            self._admit_waiting()
        try:
            while not turn.done():
                now, workers = monotonic(), self._table.usable()
                limit = self._config.queue_timeout if workers and not ticket.had_turn else self._hold_timeout
                if (left := ticket.queued_at + limit - now) <= 0:
                    raise self._timeout_error(ticket, workers)
                pause = min(left, RECHECK_SECONDS)
                if ticket.keep_alive is not None:
                    pause = min(pause, max(0.0, ticket.last_keep_alive + KEEP_ALIVE_SECONDS - now))
                await asyncio.wait((turn,), timeout=pause)
                if ticket.keep_alive is not None and not turn.done() and monotonic() - ticket.last_keep_alive >= KEEP_ALIVE_SECONDS:
                    ticket.last_keep_alive = monotonic()
                    ticket.keep_alive()
            turn.result()
        finally:
            queue.discard(ticket)

    async def _watch(self) -> None:
        """Admit waiting requests at each change of the workers, and every RECHECK_SECONDS, until the queue is empty."""
        while self._queue or self._best_effort:
            await self._table.wait_for_change(RECHECK_SECONDS)
            self._table_version += 1
            self._admit_waiting()
            if not self._table.any_usable() and (ticket := self._queue.pop() or self._best_effort.pop()) is not None:
                self._grant(ticket)  # one request checks, for all, whether the index knows a worker that discovery does not

    def _admit_waiting(self) -> None:
        """Admit as many waiting requests as the workers have capacity for."""
        while (self._queue or self._best_effort) and self._has_capacity(self._table.usable()):
            ticket = self._pop_best_effort_by_share() or self._queue.pop(self._may_retry)
            if ticket is None:
                break
            self._grant(ticket)
        while self._has_spare_worker():
            ticket = self._best_effort.pop(self._may_retry)
            if ticket is None:
                return
            self._grant(ticket)

    def _pop_best_effort_by_share(self) -> Ticket | None:
        """Return the first best-effort request if its turn has come, however many others wait."""
        ticket = self._best_effort.peek(self._may_retry)
        if ticket is None or not self._share.spend(ticket.tokens):
            return None
        self._best_effort.discard(ticket)
        return ticket

    def _has_spare_worker(self) -> bool:
        """Whether a best-effort request should go to a worker now. If not, it is checked again when the first worker ends its prompts."""
        if not self._best_effort or self._has_runnable:
            return False
        workers, now = self._table.soonest(CONSIDERED), monotonic()
        if sum(self._gate.is_spare(worker, now) for worker in workers) > self._granted_best_effort:
            return True
        seconds = [left for worker in workers if (left := worker.tokens_ahead(now) / worker.rate) > 0]
        if seconds and self._spare_timer is None:
            self._spare_timer = asyncio.get_running_loop().call_later(min(RECHECK_SECONDS, *seconds), self._recheck_spare)
        return False

    def _recheck_spare(self) -> None:
        self._spare_timer = None
        self._admit_waiting()

    def _has_capacity(self, workers: Sequence[Worker], none: bool = False) -> bool:
        """Whether some worker should get more requests. `none`: the answer where there is no worker."""
        left = float(self._granted)
        for worker in workers:
            left -= admissible_tokens(worker)
            if left < 0:
                return True
        return none and not workers

    def _grant(self, ticket: Ticket) -> None:
        ticket.is_granted, ticket.has_answer = True, False
        self._granted += ticket.tokens
        self._granted_best_effort += ticket.is_best_effort
        if self._best_effort and not ticket.is_best_effort:
            self._share.earn(ticket.tokens)
        self._num_unanswered += 1
        if not ticket.is_charged:
            ticket.is_charged = True
            ticket.account.serve(ticket.cost)
        if ticket.turn is not None and not ticket.turn.done():
            ticket.turn.set_result(None)

    def _revoke(self, ticket: Ticket) -> None:
        self.record_sent(ticket)
        if not ticket.has_answer:
            ticket.has_answer = True
            self._num_unanswered -= 1

    def _check_queue_limits(self, ticket: Ticket) -> None:
        """Raise ApiError unless the queues have room for the request, or another one can be displaced: best effort first."""
        if self._is_closed:
            raise unavailable(SHUTTING_DOWN, retry_after=1)
        limits, victims = self._config, list[Ticket]()
        while self.queued()[0] >= limits.max_queue_requests or self._queued_bytes() + ticket.size > MAX_QUEUE_BYTES:
            if ticket.is_best_effort:
                victim = self._best_effort.find_victim(ticket)
            else:
                victim = self._best_effort.find_last() or self._queue.find_victim(ticket)
            if victim is None:
                for displaced in reversed(victims):
                    self._queue_of(displaced).push(displaced)
                raise self._full_error(ticket)
            self._queue_of(victim).discard(victim)
            victims.append(victim)
        for victim in victims:
            if victim.turn is not None and not victim.turn.done():
                victim.turn.set_exception(self._full_error(ticket))

    def _queue_of(self, ticket: Ticket) -> FairQueue[Ticket]:
        return self._best_effort if ticket.is_best_effort else self._queue

    def _full_error(self, ticket: Ticket) -> ApiError:
        workers = self._table.usable()
        if workers:
            return self._overload_error("queue", "The service is overloaded: its queue is full.", self.expected_ttft(ticket, workers))
        return self._no_worker_error("No worker is ready, and too many requests wait for one")

    def _timeout_error(self, ticket: Ticket, workers: Sequence[Worker]) -> ApiError:
        if workers and not ticket.had_turn:
            return self._overload_error(
                "queue_timeout", "The service is overloaded: the request waited too long.", self.expected_ttft(ticket, workers)
            )
        waited = max(self._hold_timeout, round(monotonic() - ticket.queued_at))  # the timeout may have become shorter meanwhile
        return self._no_worker_error(f"No worker became ready within {waited:g} s")

    def _no_worker_error(self, message: str) -> ApiError:
        self._metrics.count_refusal("hold")
        description, retry_after = self._scale_up.description, self._scale_up.retry_after
        when = f"in {retry_after} s" if description else "later"
        return unavailable(f"{message}{description}. Try again {when}.", retry_after=retry_after)

    def _overload_error(self, reason: RefusalReason, message: str, seconds: float) -> ApiError:
        self._metrics.count_refusal(reason)
        wait = min(600, max(1, math.ceil(seconds)))
        return overloaded(f"{message} Try again in {wait} s.", wait)

    def _reject_waiting(self) -> None:
        self._is_closed = True
        for ticket in itertools.chain(self._queue, self._best_effort):
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_exception(unavailable(SHUTTING_DOWN, retry_after=1))

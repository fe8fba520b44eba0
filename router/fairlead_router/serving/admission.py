"""When a request may go to a worker. While the workers take what comes this is a comparison of two numbers; after that requests wait
here, where they can be put in order, and not in the workers' queues, where they cannot.

A worker is given as much as it can prefill in the next two seconds, or eight requests: enough that it never waits for us, since an answer
that begins calls the next request at once. The same queue holds requests while there is no worker at all.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from fairlead_router.config import RouterConfig
from fairlead_router.errors import ApiError, overloaded, unavailable
from fairlead_router.fleet.scale_up_status import ScaleUpStatus
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.serving.fair_queue import FairQueue
from fairlead_router.supervision import supervise
from fairlead_router.tenancy.quota import Account

AHEAD_SECONDS = 2.0
AHEAD_TOKENS = 16384
"""For a worker that has not measured its rate: two of its largest steps."""
AHEAD_REQUESTS = 8
HOLD_SECONDS, HOLD_WHILE_STARTING = 30.0, 600.0
"""Without `--hold-timeout`: how long a request waits for a worker, and how long while workers advance. Ten minutes are what OpenAI's
clients wait; a load that stalls is no advance, since its pod is restarted by its probe and is a fault from then on."""
SCARCE_PAGES = 0.05
"""Part of a worker's KV pages below which requests that wait there wait for pages, not for prefill."""
RECHECK_SECONDS = 1.0
"""How often the queue is looked at unasked: the index may know of a worker, or a breaker have closed, without anybody saying so here."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place."""

    account: Account
    priority: int
    tokens: int
    size: int
    cost: float = 0.0
    """Tokens that it will probably use, prompt and output."""
    keep_alive: Callable[[], None] | None = None
    """Tells the client of a stream that it is held; None for other answers."""
    last_keep_alive: float = field(default_factory=monotonic)
    """When it last did, or should have begun to count: a turn that finds no worker does not put it off."""
    number: int = 0
    queued_at: float = field(default_factory=monotonic)
    waits_for_worker: bool = False
    """It had its turn, and there was no worker for it."""
    retried_at: int = -1
    """... at which look at the workers."""
    turn: "asyncio.Future[None] | None" = None
    is_granted: bool = False
    """May choose a worker, and has not been sent to it yet."""
    is_charged: bool = False
    """Its tenant was charged for the turn."""
    has_answer: bool = True
    """Its answer has begun, or it was not granted: it is nothing that a worker has yet to begin."""


def admissible_tokens(worker: Worker) -> float:
    """Prompt tokens that the worker should be given now."""
    load = worker.load
    few = float(worker.unanswered < AHEAD_REQUESTS)
    seats = worker.max_running > 0 and load.running >= worker.max_running
    if load.waiting and (seats or load.pages_free < SCARCE_PAGES * load.pages_total):
        return few  # what it has waits for running requests to end: more prompts would only stand in its queue
    return max(few, (AHEAD_SECONDS * load.prefill_rate or AHEAD_TOKENS) - worker.pending_tokens)


class Admission:
    """`enter`, then `sent` at each attempt, `begun` with the first byte, and `leave` in the end, whatever happened."""

    def __init__(self, config: RouterConfig, table: WorkerTable, metrics: Metrics, coming: ScaleUpStatus) -> None:
        self._config, self._table, self._metrics, self._scale_up = config, table, metrics, coming
        self._queue: FairQueue[Ticket] = FairQueue()
        self._numbers = itertools.count()
        self._granted = 0
        """Prompt tokens of requests that choose a worker just now."""
        self._num_unanswered = 0
        self._table_version = 0
        """At the workers, by `_watch`: each may have found another than before."""
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False
        metrics.watch_queue(lambda: self._queue.total.count, lambda: self._queue.total.size, self._num_waiting_for_worker)

    async def enter(self, ticket: Ticket) -> None:
        """Return when it is the request's turn. Raises ApiError: 429 where it would take too long or too many wait, 503 without workers."""
        ticket.number = next(self._numbers)
        if self._config.max_expected_ttft:
            self._shed(ticket)
        if not self._has_runnable and (self._num_unanswered < AHEAD_REQUESTS or self._has_capacity(self._table.usable(), none=True)):
            self._grant(ticket)
            return
        await self._wait(ticket)

    async def requeue(self, ticket: Ticket) -> None:
        """There was no worker for it: wait for the next turn, at its old place."""
        self._revoke(ticket)
        ticket.retried_at = self._table_version
        if not ticket.waits_for_worker:
            ticket.waits_for_worker, ticket.queued_at = True, monotonic()
        await self._wait(ticket)

    def record_sent(self, ticket: Ticket) -> None:
        """It is on its way: from now on the worker's own figures count it."""
        if ticket.is_granted:
            ticket.is_granted = False
            self._granted -= ticket.tokens

    def record_answer(self, ticket: Ticket) -> None:
        """Its answer has begun: another may go."""
        self._revoke(ticket)
        if self._queue:
            self._admit_waiting()

    leave = record_answer

    def drain(self, seconds: float) -> None:
        """Who still waits `seconds` from now is told to go elsewhere, while there is time to."""
        asyncio.get_running_loop().call_later(seconds, self._reject_waiting)

    def expected_ttft(self, ticket: Ticket, workers: Sequence[Worker]) -> float:
        """Seconds to its first token."""
        ahead = self._queue.tokens_ahead(ticket) / sum(worker.rate for worker in workers)
        return ahead + min(worker.expected_wait() + ticket.tokens / worker.rate for worker in workers)

    def queued(self) -> tuple[int, int]:
        """Requests that wait here, and their prompt tokens."""
        return self._queue.total.count, self._queue.total.tokens

    # Inside

    def _num_waiting_for_worker(self) -> int:
        """Of those that wait, how many do so for a worker."""
        return sum(ticket.waits_for_worker for ticket in self._queue) if self._table.any_usable() else len(self._queue)

    @property
    def _has_runnable(self) -> bool:
        """Somebody waits whom a newcomer must not overtake. Not those that the workers of now are no use to, as for an adapter that none of
        them has: nobody need wait with them."""
        return bool(self._queue) and (any(map(self._may_retry, self._queue)) or not self._table.any_usable())

    def _may_retry(self, ticket: Ticket) -> bool:
        """It has not asked since the last look at the workers: else it would find none again, however much room there is."""
        return ticket.retried_at != self._table_version

    @property
    def _hold_timeout(self) -> float:
        """Seconds that a request waits for a worker."""
        if self._config.hold_timeout is not None:
            return self._config.hold_timeout
        return HOLD_WHILE_STARTING if self._scale_up.is_advancing else HOLD_SECONDS

    async def _wait(self, ticket: Ticket) -> None:
        self._check_queue_limits(ticket)
        turn = ticket.turn = asyncio.get_running_loop().create_future()
        self._queue.push(ticket)
        if self._watching is None or self._watching.done():
            self._watching = supervise("queue", self._watch, self._metrics.task_failures)
        try:
            while not turn.done():
                now, workers = monotonic(), self._table.usable()
                limit = self._config.queue_timeout if workers and not ticket.waits_for_worker else self._hold_timeout
                if (left := ticket.queued_at + limit - now) <= 0:
                    raise self._timeout_error(ticket, workers)
                pause = min(left, RECHECK_SECONDS)
                if ticket.keep_alive is not None:
                    pause = min(pause, max(0.0, ticket.last_keep_alive + self._config.hold_keepalive - now))
                await asyncio.wait((turn,), timeout=pause)
                if (
                    ticket.keep_alive is not None
                    and not turn.done()
                    and monotonic() - ticket.last_keep_alive >= self._config.hold_keepalive
                ):
                    ticket.last_keep_alive = monotonic()
                    ticket.keep_alive()
            turn.result()
        finally:
            self._queue.discard(ticket)

    async def _watch(self) -> None:
        """While somebody waits: look again at every change of the workers, and now and then."""
        while self._queue:
            await self._table.wait_for_change(RECHECK_SECONDS)
            self._table_version += 1
            self._admit_waiting()
            if not self._table.any_usable() and (ticket := self._queue.pop()) is not None:
                self._grant(ticket)  # one asks for all whether the index knows a worker that discovery does not

    def _admit_waiting(self) -> None:
        """Turns for as many as there is room for."""
        while self._queue and self._has_capacity(self._table.usable()):
            ticket = self._queue.pop(self._may_retry)
            if ticket is None:
                return
            self._grant(ticket)

    def _has_capacity(self, workers: Sequence[Worker], none: bool = False) -> bool:
        """Some worker should be given more; `none`: what to say where there is no worker."""
        left = float(self._granted)
        for worker in workers:
            left -= admissible_tokens(worker)
            if left < 0:
                return True
        return none and not workers

    def _grant(self, ticket: Ticket) -> None:
        ticket.is_granted, ticket.has_answer = True, False
        self._granted += ticket.tokens
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

    def _shed(self, ticket: Ticket) -> None:
        workers = self._table.usable()
        if not workers:
            return
        over = self.expected_ttft(ticket, workers) - self._config.max_expected_ttft
        if over > 0:
            raise self._overload_error("expected_ttft", "The service is overloaded: the first token would take too long.", over)

    def _check_queue_limits(self, ticket: Ticket) -> None:
        """Raises ApiError unless the queue has room for it, or another tenant's request has to make room."""
        if self._is_closed:
            raise unavailable("This router is shutting down. Try again at once.", retry_after=1)
        total = self._queue.total
        while total.count >= self._config.max_queue_requests or total.size + ticket.size > self._config.max_queue_bytes:
            victim = self._queue.find_victim(ticket)
            error = self._full_error(ticket)
            if victim is None:
                raise error
            self._queue.discard(victim)
            if victim.turn is not None and not victim.turn.done():
                victim.turn.set_exception(error)

    def _full_error(self, ticket: Ticket) -> ApiError:
        workers = self._table.usable()
        if workers:
            return self._overload_error("queue", "The service is overloaded: too many requests wait.", self.expected_ttft(ticket, workers))
        self._metrics.refused.labels("hold").inc()
        return unavailable(
            f"No worker is ready, and too many requests wait for one{self._scale_up.description}.", retry_after=self._scale_up.retry_after
        )

    def _timeout_error(self, ticket: Ticket, workers: Sequence[Worker]) -> ApiError:
        if workers and not ticket.waits_for_worker:
            return self._overload_error(
                "queue_timeout", "The service is overloaded: the request waited too long.", self.expected_ttft(ticket, workers)
            )
        said, again = self._scale_up.description, self._scale_up.retry_after
        when = f"in {again} s" if said else "later"
        waited = max(self._hold_timeout, round(monotonic() - ticket.queued_at))  # what held them up may have shown itself only now
        return unavailable(f"No worker became ready within {waited:g} s{said}. Try again {when}.", retry_after=again)

    def _overload_error(self, reason: str, message: str, seconds: float) -> ApiError:
        self._metrics.refused.labels(reason).inc()
        wait = min(600, max(1, math.ceil(seconds)))
        return overloaded(f"{message} Try again in {wait} s.", wait)

    def _reject_waiting(self) -> None:
        self._is_closed = True
        for ticket in self._queue:
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_exception(unavailable("This router is shutting down. Try again at once.", retry_after=1))

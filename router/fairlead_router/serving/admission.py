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
from fairlead_router.fleet.scale_up_status import Coming
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.serving.fair_queue import FairQueue
from fairlead_router.supervision import keep
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
    told: float = field(default_factory=monotonic)
    """When it last did, or should have begun to count: a turn that finds no worker does not put it off."""
    number: int = 0
    since: float = field(default_factory=monotonic)
    held: bool = False
    """It had its turn, and there was no worker for it."""
    asked: int = -1
    """... at which look at the workers."""
    turn: "asyncio.Future[None] | None" = None
    granted: bool = False
    """May choose a worker, and has not been sent to it yet."""
    served: bool = False
    """Its tenant was charged for the turn."""
    begun: bool = True
    """Its answer has begun, or it was not granted: it is nothing that a worker has yet to begin."""


def room_of(worker: Worker) -> float:
    """Prompt tokens that the worker should be given now."""
    load = worker.load
    few = float(worker.unanswered < AHEAD_REQUESTS)
    seats = worker.max_running > 0 and load.running >= worker.max_running
    if load.waiting and (seats or load.pages_free < SCARCE_PAGES * load.pages_total):
        return few  # what it has waits for running requests to end: more prompts would only stand in its queue
    return max(few, (AHEAD_SECONDS * load.prefill_rate or AHEAD_TOKENS) - worker.pending_tokens)


class Admission:
    """`enter`, then `sent` at each attempt, `begun` with the first byte, and `leave` in the end, whatever happened."""

    def __init__(self, config: RouterConfig, table: WorkerTable, metrics: Metrics, coming: Coming) -> None:
        self._config, self._table, self._metrics, self._coming = config, table, metrics, coming
        self._queue: FairQueue[Ticket] = FairQueue()
        self._numbers = itertools.count()
        self._granted = 0
        """Prompt tokens of requests that choose a worker just now."""
        self._unbegun = 0
        self._looks = 0
        """At the workers, by `_watch`: each may have found another than before."""
        self._watching: asyncio.Task[None] | None = None
        self._over = False
        metrics.waiting(lambda: self._queue.total.count, lambda: self._queue.total.size, self._held)

    async def enter(self, ticket: Ticket) -> None:
        """Return when it is the request's turn. Raises ApiError: 429 where it would take too long or too many wait, 503 without workers."""
        ticket.number = next(self._numbers)
        if self._config.max_expected_ttft:
            self._shed(ticket)
        if not self._awaited and (self._unbegun < AHEAD_REQUESTS or self._room(self._table.usable(), none=True)):
            self._grant(ticket)
            return
        await self._wait(ticket)

    async def again(self, ticket: Ticket) -> None:
        """There was no worker for it: wait for the next turn, at its old place."""
        self._take_back(ticket)
        ticket.asked = self._looks
        if not ticket.held:
            ticket.held, ticket.since = True, monotonic()
        await self._wait(ticket)

    def sent(self, ticket: Ticket) -> None:
        """It is on its way: from now on the worker's own figures count it."""
        if ticket.granted:
            ticket.granted = False
            self._granted -= ticket.tokens

    def begun(self, ticket: Ticket) -> None:
        """Its answer has begun: another may go."""
        self._take_back(ticket)
        if self._queue:
            self._call()

    leave = begun

    def drain(self, seconds: float) -> None:
        """Who still waits `seconds` from now is told to go elsewhere, while there is time to."""
        asyncio.get_running_loop().call_later(seconds, self._end)

    def expected(self, ticket: Ticket, workers: Sequence[Worker]) -> float:
        """Seconds to its first token."""
        ahead = self._queue.ahead(ticket) / sum(worker.rate for worker in workers)
        return ahead + min(worker.expected_wait() + ticket.tokens / worker.rate for worker in workers)

    def queued(self) -> tuple[int, int]:
        """Requests that wait here, and their prompt tokens."""
        return self._queue.total.count, self._queue.total.tokens

    # Inside

    def _held(self) -> int:
        """Of those that wait, how many do so for a worker."""
        return sum(ticket.held for ticket in self._queue) if self._table.any_usable() else len(self._queue)

    @property
    def _awaited(self) -> bool:
        """Somebody waits whom a newcomer must not overtake. Not those that the workers of now are no use to, as for an adapter that none of
        them has: nobody need wait with them."""
        return bool(self._queue) and (any(map(self._may_go, self._queue)) or not self._table.any_usable())

    def _may_go(self, ticket: Ticket) -> bool:
        """It has not asked since the last look at the workers: else it would find none again, however much room there is."""
        return ticket.asked != self._looks

    @property
    def _patience(self) -> float:
        """Seconds that a request waits for a worker."""
        if self._config.hold_timeout is not None:
            return self._config.hold_timeout
        return HOLD_WHILE_STARTING if self._coming.advancing else HOLD_SECONDS

    async def _wait(self, ticket: Ticket) -> None:
        self._make_room(ticket)
        turn = ticket.turn = asyncio.get_running_loop().create_future()
        self._queue.push(ticket)
        if self._watching is None or self._watching.done():
            self._watching = keep("queue", self._watch, self._metrics.task_failures)
        try:
            while not turn.done():
                now, workers = monotonic(), self._table.usable()
                limit = self._config.queue_timeout if workers and not ticket.held else self._patience
                if (left := ticket.since + limit - now) <= 0:
                    raise self._too_long(ticket, workers)
                pause = min(left, RECHECK_SECONDS)
                if ticket.keep_alive is not None:
                    pause = min(pause, max(0.0, ticket.told + self._config.hold_keepalive - now))
                await asyncio.wait((turn,), timeout=pause)
                if ticket.keep_alive is not None and not turn.done() and monotonic() - ticket.told >= self._config.hold_keepalive:
                    ticket.told = monotonic()
                    ticket.keep_alive()
            turn.result()
        finally:
            self._queue.discard(ticket)

    async def _watch(self) -> None:
        """While somebody waits: look again at every change of the workers, and now and then."""
        while self._queue:
            await self._table.changed(RECHECK_SECONDS)
            self._looks += 1
            self._call()
            if not self._table.any_usable() and (ticket := self._queue.pop()) is not None:
                self._grant(ticket)  # one asks for all whether the index knows a worker that discovery does not

    def _call(self) -> None:
        """Turns for as many as there is room for."""
        while self._queue and self._room(self._table.usable()):
            ticket = self._queue.pop(self._may_go)
            if ticket is None:
                return
            self._grant(ticket)

    def _room(self, workers: Sequence[Worker], none: bool = False) -> bool:
        """Some worker should be given more; `none`: what to say where there is no worker."""
        left = float(self._granted)
        for worker in workers:
            left -= room_of(worker)
            if left < 0:
                return True
        return none and not workers

    def _grant(self, ticket: Ticket) -> None:
        ticket.granted, ticket.begun = True, False
        self._granted += ticket.tokens
        self._unbegun += 1
        if not ticket.served:
            ticket.served = True
            ticket.account.serve(ticket.cost)
        if ticket.turn is not None and not ticket.turn.done():
            ticket.turn.set_result(None)

    def _take_back(self, ticket: Ticket) -> None:
        self.sent(ticket)
        if not ticket.begun:
            ticket.begun = True
            self._unbegun -= 1

    def _shed(self, ticket: Ticket) -> None:
        workers = self._table.usable()
        if not workers:
            return
        over = self.expected(ticket, workers) - self._config.max_expected_ttft
        if over > 0:
            raise self._refuse("expected_ttft", "The service is overloaded: the first token would take too long.", over)

    def _make_room(self, ticket: Ticket) -> None:
        """Raises ApiError unless the queue has room for it, or another tenant's request has to make room."""
        if self._over:
            raise unavailable("This router is shutting down. Try again at once.", retry_after=1)
        total = self._queue.total
        while total.count >= self._config.max_queue_requests or total.size + ticket.size > self._config.max_queue_bytes:
            victim = self._queue.to_displace(ticket)
            error = self._full(ticket)
            if victim is None:
                raise error
            self._queue.discard(victim)
            if victim.turn is not None and not victim.turn.done():
                victim.turn.set_exception(error)

    def _full(self, ticket: Ticket) -> ApiError:
        workers = self._table.usable()
        if workers:
            return self._refuse("queue", "The service is overloaded: too many requests wait.", self.expected(ticket, workers))
        self._metrics.refused.labels("hold").inc()
        return unavailable(
            f"No worker is ready, and too many requests wait for one{self._coming.words}.", retry_after=self._coming.retry_after
        )

    def _too_long(self, ticket: Ticket, workers: Sequence[Worker]) -> ApiError:
        if workers and not ticket.held:
            return self._refuse("queue_timeout", "The service is overloaded: the request waited too long.", self.expected(ticket, workers))
        said, again = self._coming.words, self._coming.retry_after
        when = f"in {again} s" if said else "later"
        waited = max(self._patience, round(monotonic() - ticket.since))  # what held them up may have shown itself only now
        return unavailable(f"No worker became ready within {waited:g} s{said}. Try again {when}.", retry_after=again)

    def _refuse(self, reason: str, message: str, seconds: float) -> ApiError:
        self._metrics.refused.labels(reason).inc()
        wait = min(600, max(1, math.ceil(seconds)))
        return overloaded(f"{message} Try again in {wait} s.", wait)

    def _end(self) -> None:
        self._over = True
        for ticket in self._queue:
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_exception(unavailable("This router is shutting down. Try again at once.", retry_after=1))

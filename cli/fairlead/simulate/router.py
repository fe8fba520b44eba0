"""A modelled router: its policy, and in front of Fairlead's pods its queue, which runs the product's code."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fairlead.simulate.fleet import Fleet, InflightRequest, InflightRequests
from fairlead.simulate.policies import Policy
from fairlead.simulate.router_view import RouterView
from fairlead.simulate.service_classes import Objective
from fairlead.simulate.workloads.request import Request
from fairlead_router.fleet.workers import Worker
from fairlead_router.serving.admission import admissible_tokens, expected_ttft
from fairlead_router.serving.fair_queue import FairQueue


@dataclass(slots=True, eq=False)
class Account:
    """The only tenant."""

    served_tokens: float = 0.0


@dataclass(slots=True, eq=False)
class Ticket:
    """A request at its router. Lower `priority` goes first."""

    request: Request
    position: int
    objective: Objective
    account: Account
    number: int = 0
    size: int = 0
    work: int = 0
    had_turn: bool = False

    @property
    def priority(self) -> int:
        return self.objective.service_class

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens


Send = Callable[[InflightRequest], None]


def admits(ticket: Ticket, work_ahead: float, workers: Sequence[Worker]) -> bool:
    """Whether a request is expected to get its first token within its bound, by the formula of `--max-expected-ttft`. Pure.

    The wait alone must be within the part of the bound that does not grow with the prompt. Otherwise the queue becomes as long as the
    longest prompts allow, and only those are admitted: goodput at 2 times capacity was a third (conversation trace).
    `work_ahead`: tokens to compute for requests that go before it in the queue.
    """
    if not workers:
        return True
    objective = ticket.objective
    return expected_ttft(work_ahead, 0, workers) <= objective.wait and expected_ttft(work_ahead, ticket.work, workers) <= objective.ttft


class Router:
    """One router. `send` delivers a request to its pod. Peers send each request at once, if any pod is usable.

    `has_queue`: ours, which holds requests back. `has_bounds`: it knows the bounds of the classes, and refuses what would miss them.
    """

    def __init__(
        self,
        number: int,
        fleet: Fleet,
        policy: Policy,
        inflight: InflightRequests,
        draw: random.Random,
        has_queue: bool,
        has_bounds: bool,
        send: Send,
    ) -> None:
        self.policy = policy
        self.queue: FairQueue[Ticket] = FairQueue()
        self._account = Account()
        self._number, self._fleet, self._send = number, fleet, send
        self._view = RouterView(fleet, inflight, draw) if has_queue else None
        self._has_bounds = has_bounds and has_queue
        self._numbers = itertools.count()

    def enter(self, request: Request, position: int, objective: Objective, now: float) -> None:
        """Accept or refuse a request, now."""
        ticket = Ticket(request, position, objective, self._account, next(self._numbers))
        if self._view is not None:
            ticket.work = max(1, request.prompt_tokens - max(self._fleet.depths(request.blocks), default=0) * self._fleet.block_tokens)
            if self._has_bounds and not admits(ticket, self.queue.work_ahead(ticket), self._view.usable(now)):
                return
        if not self.queue and self._has_capacity(now):
            self._dispatch(ticket, now)
        else:
            self.queue.push(ticket)

    def admit_waiting(self, now: float) -> None:
        """Send as many waiting requests as the pods have capacity for."""
        while self.queue and self._has_capacity(now):
            ticket = self.queue.pop()
            assert ticket is not None, "the queue has a request"
            self._dispatch(ticket, now)

    def _has_capacity(self, now: float) -> bool:
        if self._view is None:
            return bool(self._fleet.usable)
        return any(admissible_tokens(worker) > 0 for worker in self._view.usable(now))

    def _dispatch(self, ticket: Ticket, now: float) -> None:
        request = ticket.request
        pod, cached = self.policy.choose(request, now)
        cost = max(request.prompt_tokens - cached, 1)
        self._send(InflightRequest(request, ticket.position, self._number, pod, now, cost, self.policy.reserves))

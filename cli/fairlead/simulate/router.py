"""A modelled router: its policy, and in front of Fairlead's pods its queue, which runs the product's code."""

import itertools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from fairlead.simulate.fleet import Fleet, InflightRequest, InflightRequests
from fairlead.simulate.policies import OwnPolicy, Policy
from fairlead.simulate.service_classes import Objective, ServiceClass
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request
from fairlead_router.fleet.workers import Worker
from fairlead_router.serving.admission import admissible_tokens
from fairlead_router.serving.bounded_admission import BoundedAdmission, BoundedRequest, WorkerEstimate
from fairlead_router.serving.fair_queue import FairQueue
from fairlead_router.serving.slo_gate import estimate_worker, used_share


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


class Router:
    """One router. `send` delivers a request to its pod. Peers send each request at once, if any pod is usable.

    `has_queue`: ours, which holds requests back.
    `classes`: those that it knows; it refuses what would miss their bounds. Refused requests do not return.
    """

    def __init__(
        self,
        number: int,
        fleet: Fleet,
        policy: Policy,
        inflight: InflightRequests,
        draw: random.Random,
        has_queue: bool,
        classes: Sequence[ServiceClass],
        send: Send,
    ) -> None:
        self.policy = policy
        self.queue: FairQueue[Ticket] = FairQueue()
        self._account = Account()
        self._number, self._fleet, self._send = number, fleet, send
        self._view = policy.view if has_queue and isinstance(policy, OwnPolicy) else None
        self._classes = [each.for_router(priority) for priority, each in enumerate(classes)] if has_queue else []
        self._admission = BoundedAdmission()
        self._numbers = itertools.count()

    def enter(self, request: Request, position: int, objective: Objective, now: float) -> None:
        """Accept or refuse a request, now."""
        ticket = Ticket(request, position, objective, self._account, next(self._numbers))
        if self._view is not None:
            ticket.work = max(1, request.prompt_tokens - max(self._held(request), default=0))
            if self._classes and not self._is_within_bounds(ticket, now):
                return
        if not self.queue and self._has_capacity(now):
            self._dispatch(ticket, now)
        else:
            self.queue.push(ticket)

    def _is_within_bounds(self, ticket: Ticket, now: float) -> bool:
        """Whether the product's admission accepts the request."""
        assert self._view is not None, "only our routers know classes"
        workers = self._view.usable(now)
        if self._classes[ticket.objective.service_class].is_best_effort or not workers:
            return True
        request, estimates = self._estimate(ticket, workers, now)
        ahead, share = self.queue.work_ahead(ticket), used_share(workers)
        return not self._admission.decide(request, estimates, ahead, now, share=share).rejection

    def _unsuitable(self, ticket: Ticket, now: float) -> Collection[int]:
        """Return the pods that would miss the request's bounds while another meets them, as `SloGate.unsuitable` does."""
        if not self._classes or self._view is None or self._classes[ticket.objective.service_class].is_best_effort:
            return ()
        request, estimates = self._estimate(ticket, self._view.usable(now), now)
        late = [pod for pod, estimate in zip(self._fleet.usable, estimates, strict=True) if not request.can_start(estimate)]
        return late if len(late) < len(estimates) else ()

    def _estimate(self, ticket: Ticket, workers: Sequence[Worker], now: float) -> tuple[BoundedRequest, list[WorkerEstimate]]:
        policy, pods, prompt, held = self.policy, self._fleet.usable, ticket.request.prompt_tokens, self._held(ticket.request)
        assert isinstance(policy, OwnPolicy), "only our routers know classes"
        estimates = [
            estimate_worker(worker, max(1, prompt - held[pod]), now, policy.prefill_seconds(pod, now))
            for worker, pod in zip(workers, pods, strict=True)
        ]
        service_class, elapsed = self._classes[ticket.objective.service_class], now - ticket.request.at
        cached = max(held[pod] for pod in pods)
        return BoundedRequest(ticket.position, "", ticket.priority, service_class, elapsed, prompt, cached), estimates

    def _held(self, request: Request) -> list[int]:
        """Return the tokens of the prompt that each pod caches."""
        return [depth * BLOCK_TOKENS for depth in self._fleet.depths(request.blocks)]

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
        if isinstance(self.policy, OwnPolicy):
            placed = self.policy.choose(request, now, self._unsuitable(ticket, now))
        else:
            placed = self.policy.choose(request, now)
        cost = max(request.prompt_tokens - placed.cached, 1)
        self._send(InflightRequest(request, ticket.position, self._number, placed.pod, now, cost, placed.reservation))

    def release(self, flight: InflightRequest) -> None:
        """End a request's reservation: it has its first token."""
        if isinstance(self.policy, OwnPolicy):
            self.policy.release(flight.reservation)

"""A modelled router: its policy, and in front of Fairlead's pods the product's queue, with its gate for service classes."""

import itertools
from collections.abc import Callable, Sequence

from fairlead.simulate.fleet import Fleet, InflightRequest, InflightRequests
from fairlead.simulate.ours import Fairlead, to_routing_request
from fairlead.simulate.policies import Policy
from fairlead.simulate.router_view import RouterView
from fairlead.simulate.service_classes import Objective, ServiceClass
from fairlead.simulate.workloads.request import Request
from fairlead_router.errors import ApiError
from fairlead_router.fleet.scale_up_status import ScaleUpStatus
from fairlead_router.metrics import Metrics
from fairlead_router.request.client_request import Outcome
from fairlead_router.routing.policies import Tried
from fairlead_router.service_classes import ServiceClasses
from fairlead_router.serving.admission import admissible_tokens
from fairlead_router.serving.demand import Demand
from fairlead_router.serving.fair_queue import FairQueue, QueuedRequest
from fairlead_router.serving.slo_gate import ClassTerms, SloGate
from fairlead_router.tenancy.quota import Account
from fairlead_router.tenancy.tenants import Tenant


class Ticket(QueuedRequest, eq=False, kw_only=True):
    """A request at its router."""

    request: Request
    position: int
    terms: ClassTerms | None = None


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
        has_queue: bool,
        classes: Sequence[ServiceClass],
        send: Send,
    ) -> None:
        self._policy = policy
        self._own = policy if isinstance(policy, Fairlead) else None
        self._view = self._own.view if self._own is not None else RouterView(fleet, inflight)
        self.queue: FairQueue[Ticket] = FairQueue()
        queued, table = self.queue.total, self._view.table
        self.demand = Demand(table, ScaleUpStatus(), lambda: (queued.count, queued.tokens), fleet.table.unique_shares, fleet.clock)
        self._number, self._fleet, self._send, self._has_queue = number, fleet, send, has_queue
        self._account, self._numbers = Account(Tenant(), lambda: 1.0), itertools.count()
        self._classes = [each.for_router(priority) for priority, each in enumerate(classes)]
        self._gate: SloGate | None = None
        if self._own is not None and has_queue and classes:
            known, own = ServiceClasses(self._classes), self._own
            self._gate = SloGate(table, Metrics(table), known, own.predict, own.tokens_ahead, fleet.clock)

    def enter(self, request: Request, position: int, objective: Objective) -> None:
        """Accept or refuse a request, now."""
        priority, tokens, number = objective.service_class, request.prompt_tokens, next(self._numbers)
        ticket = Ticket(self._account, priority, tokens, 0, number=number, request=request, position=position)
        self.demand.request_started(ticket.tokens)
        if self._own is not None and self._has_queue:
            self._view.update()
            wanted = to_routing_request(request)
            ticket.work = max(1, ticket.tokens - max(self._own.predict(wanted).values(), default=0))
            if self._gate is not None:
                service_class = self._classes[ticket.priority]
                ticket.terms = ClassTerms(service_class, wanted, ticket.priority, request.at, key=position)
                try:
                    self._gate.check(ticket.terms, self.queue.work_ahead(ticket))
                except ApiError:
                    self.demand.request_ended()
                    return
        if not self.queue and self._has_capacity():
            self._dispatch(ticket)
        else:
            self.queue.push(ticket)

    def admit_waiting(self) -> None:
        """Send as many waiting requests as the pods have capacity for."""
        while self.queue and self._has_capacity():
            ticket = self.queue.pop()
            assert ticket is not None, "the queue has a request"
            self._dispatch(ticket)

    def _has_capacity(self) -> bool:
        if not self._has_queue:
            return bool(self._fleet.usable)
        self._view.update()
        return any(admissible_tokens(worker) > 0 for worker in self._view.table.usable())

    def _dispatch(self, ticket: Ticket) -> None:
        request = ticket.request
        placed = self._own.choose(request, self._unsuitable(ticket)) if self._own is not None else self._policy.choose(request)
        cost = max(request.prompt_tokens - placed.cached, 1)
        now = self._fleet.clock.now
        flight = InflightRequest(request, ticket.position, self._number, placed.pod, now, cost, placed.reservation)
        self._view.record_sent(flight)
        self._send(flight)

    def _unsuitable(self, ticket: Ticket) -> Tried:
        if self._gate is None or ticket.terms is None or ticket.terms.service_class.is_best_effort:
            return ()
        self._view.update()
        return self._gate.unsuitable(ticket.terms)

    def release(self, flight: InflightRequest) -> None:
        """End a request's reservation: it has its first token."""
        self._view.record_first_token(flight)
        if self._own is not None:
            self._own.release(flight.reservation)

    def end_request(self, flight: InflightRequest) -> None:
        """Record the end of an answer."""
        address = self._fleet.addresses[flight.pod]
        tokens, cached = flight.request.prompt_tokens, flight.cached
        self.demand.request_ended(Outcome(worker=address, prompt_tokens=tokens, cached_tokens=cached, first_byte_at=flight.first_token_at))

    def report(self) -> dict[str, object]:
        """Return what the router answers to the operator, now."""
        self._view.update()
        return self.demand.page(with_unique_shares=True)

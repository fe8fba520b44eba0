"""Replay of a workload with one policy: the pod of each request, and what pods and index know at that time."""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from fairlead.simulate.autoscale import PERIOD, Autoscaler
from fairlead.simulate.fleet import Fleet, InflightRequest
from fairlead.simulate.lifecycle import Lifecycle
from fairlead.simulate.ours import Fairlead
from fairlead.simulate.outcome import Outcome
from fairlead.simulate.pods import Pod, PodModel
from fairlead.simulate.policies import POLICIES
from fairlead.simulate.router import Router
from fairlead.simulate.service_classes import DEFAULT_CLASSES, ServiceClass, assign_classes
from fairlead.simulate.workloads.request import Request
from fairlead_operator.api.scaling import Scaling
from fairlead_operator.scaling.demand import RouterReport
from fairlead_router.serving.admission import RECHECK_SECONDS


@dataclass(frozen=True, slots=True)
class Scenario:
    """All but policy, workload and seed.

    `redis_away`: start and end, in seconds of the run, of an outage of Redis; it affects only the policy `fairlead`.
    `autoscale`: bounds and target of the operator's autoscaler, which begins with `pods`.
    `has_bounds`: our routers know the bounds of the classes.
    """

    pods: int
    model: PodModel = field(default_factory=PodModel)
    routers: int = 1
    redis_away: tuple[float, float] | None = None
    classes: Sequence[ServiceClass] = DEFAULT_CLASSES
    has_bounds: bool = False
    autoscale: Scaling | None = None


def replay(policy: str, requests: list[Request], scenario: Scenario, seed: int = 0) -> Outcome:
    """Replay the requests until the last one ends. The same arguments give the same outcome.

    Each request goes to a random one of the routers. Fairlead's pods show a prompt to the index when it waits, others when it
    is computed.
    """
    return _Run(policy, requests, scenario, seed).play()


class _Run:
    """Pods and routers over time."""

    def __init__(self, policy: str, requests: list[Request], scenario: Scenario, seed: int) -> None:
        system, draw = POLICIES[policy], random.Random(seed)
        self._requests, self._scenario, self._draw = requests, scenario, draw
        unknown = [math.nan] * len(requests)
        self._outcome = Outcome(
            policy,
            scenario.classes,
            assign_classes(requests, scenario.classes, seed),
            ttft=unknown[:],
            itl=unknown,
            seconds=requests[-1].at - requests[0].at,
        )
        self._cached = 0
        self._engine = system.engine
        most = scenario.pods if scenario.autoscale is None else scenario.autoscale.max_replicas
        self._fleet = fleet = Fleet(self._make_pod, scenario.pods, most, scenario.routers)
        self._lifecycle = Lifecycle(len(fleet.pods))
        make, away = system.make, scenario.redis_away
        if policy == "fairlead" and away is not None:
            make = partial(Fairlead, away=away)
        known = scenario.classes if scenario.has_bounds else ()
        self._routers = [
            Router(number, fleet, make(fleet, inflight, draw), inflight, system.has_queue, known, self._send)
            for number, inflight in enumerate(fleet.inflight_by_router)
        ]
        self._flights: list[dict[int, InflightRequest]] = [{} for _ in fleet.pods]
        """In flight at each pod, by the pod's number of the request."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._due = [math.inf] * len(fleet.pods)
        """Each pod's next event."""
        self._rechecks: set[int] = set()
        """Routers that will recheck their queue."""
        for _ in range(scenario.pods):
            self._lifecycle.create(0.0)
        self._lifecycle.starting.clear()
        self._autoscaler = None
        self._all_arrived = False
        if scenario.autoscale is not None:
            self._autoscaler = Autoscaler(scenario.autoscale, scenario.model.start_seconds)
            self._at(PERIOD, self._scale)

    def play(self) -> Outcome:
        for position, request in enumerate(self._requests):
            self._advance(request.at)
            self._fleet.clock.now = request.at
            router = self._draw.randrange(len(self._routers)) if len(self._routers) > 1 else 0
            self._enter(router, position)
        self._all_arrived = True  # the remaining requests end with the present pods
        self._advance(math.inf)
        outcome, lifecycle = self._outcome, self._lifecycle
        outcome.computed = [pod.computed for pod in self._fleet.pods]
        outcome.hit_rate = self._cached / sum(request.prompt_tokens for request in self._requests)
        outcome.pod_seconds = lifecycle.pod_seconds + sum(max(0.0, outcome.ended_at - at) for at in lifecycle.created_at.values())
        outcome.sizes = lifecycle.sizes
        return outcome

    # Events

    @property
    def _now(self) -> float:
        return self._fleet.clock.now

    def _at(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def _advance(self, until: float) -> None:
        """Apply the events up to a moment."""
        while self._events and self._events[0][0] <= until:
            self._fleet.clock.now, _, event = heapq.heappop(self._events)
            event()

    def _follow(self, pod: int) -> None:
        """Update the index, and plan the pod's next event."""
        self._fleet.update_index(pod)
        due = self._fleet.pods[pod].next_event()
        if due != self._due[pod]:
            self._due[pod] = due
            if due < math.inf:
                self._at(due, partial(self._advance_pod, pod, due))

    def _advance_pod(self, pod: int, due: float) -> None:
        if due != self._due[pod]:
            return  # something came before it
        self._due[pod] = math.nan
        begun = []
        for progress in self._fleet.pods[pod].advance(self._now):
            flight = self._flights[pod][progress.number]
            if progress.is_last:
                del self._flights[pod][progress.number]
                self._end(flight)
                continue
            self._cached += progress.cached
            flight.cached, flight.first_token_at = progress.cached, self._now
            self._outcome.ttft[flight.position] = self._now - flight.request.at
            self._fleet.record_first_token(flight)
            self._routers[flight.router].release(flight)
            begun.append(flight.router)
        self._follow(pod)
        self._end_drained(pod)
        for router in begun:
            self._admit_waiting(router)

    def _end(self, flight: InflightRequest) -> None:
        self._fleet.end_request(flight)
        self._routers[flight.router].end_request(flight)
        self._outcome.ended_at = self._now
        steps = flight.request.output_tokens - 1
        self._outcome.itl[flight.position] = (self._now - flight.first_token_at) / steps if steps else 0.0

    # Requests

    def _enter(self, router: int, position: int) -> None:
        self._routers[router].enter(self._requests[position], position, self._outcome.objectives[position])
        self._plan_recheck(router)

    def _admit_waiting(self, router: int) -> None:
        if self._routers[router].queue:
            self._routers[router].admit_waiting()

    def _plan_recheck(self, router: int) -> None:
        if self._routers[router].queue and router not in self._rechecks:
            self._rechecks.add(router)
            self._at(self._now + RECHECK_SECONDS, partial(self._recheck, router))

    def _recheck(self, router: int) -> None:
        self._rechecks.discard(router)
        self._admit_waiting(router)
        self._plan_recheck(router)

    def _send(self, flight: InflightRequest) -> None:
        """Deliver a request to its pod, now."""
        self._fleet.add_request(flight)
        flight.number = self._fleet.pods[flight.pod].add(flight.request, self._now)
        self._flights[flight.pod][flight.number] = flight
        self._follow(flight.pod)

    # Pods

    def _make_pod(self, started: float) -> Pod:
        model = self._scenario.model
        phase = self._draw.random() * max(0.0, model.report_seconds)
        return Pod(model, phase, self._engine, started)

    def _scale(self) -> None:
        """Let the operator's autoscaler decide, and follow it."""
        fleet, lifecycle = self._fleet, self._lifecycle
        if self._autoscaler is None or (self._all_arrived and (lifecycle.desired or not any(router.queue for router in self._routers))):
            return
        reports = [msgspec.convert(router.report(), RouterReport) for router in self._routers]
        size = self._autoscaler.size(reports, lifecycle.desired, len(fleet.usable), self._now)
        while lifecycle.desired < size and (pod := lifecycle.create(self._now)) is not None:
            self._at(self._now + self._scenario.model.start_seconds, partial(self._open, pod, self._now))
        while lifecycle.desired > size:
            if lifecycle.starting:
                lifecycle.remove(max(lifecycle.starting), self._now)
                continue
            pod = self._autoscaler.least_valuable(fleet.usable, fleet.addresses)
            fleet.drain(pod)
            lifecycle.draining.add(pod)
            self._end_drained(pod)
        self._at(self._now + PERIOD, self._scale)

    def _end_drained(self, pod: int) -> None:
        if pod in self._lifecycle.draining and self._fleet.pods[pod].is_idle:
            self._fleet.close(pod)
            self._lifecycle.remove(pod, self._now)

    def _open(self, pod: int, created_at: float) -> None:
        """Put a pod into service that was created before, unless it was removed."""
        if pod not in self._lifecycle.starting or self._lifecycle.created_at[pod] != created_at:
            return
        computed = self._fleet.pods[pod].computed
        self._fleet.open(pod)
        self._fleet.pods[pod].computed = computed
        self._lifecycle.starting.discard(pod)
        for router in range(len(self._routers)):
            self._admit_waiting(router)

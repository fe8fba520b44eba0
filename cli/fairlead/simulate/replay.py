"""Replay of a trace with one policy: the pod of each request, and what pods and index know at that time."""

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field

from fairlead.simulate.fleet import Fleet, InflightRequest, InflightRequests
from fairlead.simulate.ours import WithRedisOutage
from fairlead.simulate.pods import Engine, Pod, PodModel, Prefill
from fairlead.simulate.policies import OURS, POLICIES, Maker, Policy
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request


@dataclass(slots=True)
class Outcome:
    """The result of one replay: TTFT per request in seconds, computed prompt tokens per pod, share of cached prompt tokens."""

    policy: str
    ttft: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    hit_rate: float = 0.0

    @property
    def imbalance(self) -> float:
        """Prefill tokens of the busiest pod divided by the mean."""
        return max(self.computed) * len(self.computed) / max(1, sum(self.computed))

    def figures(self) -> dict[str, float]:
        times = sorted(self.ttft)

        def percentile(share: float) -> float:
            return times[min(len(times) - 1, int(share * len(times)))]

        return {
            "hit_rate": self.hit_rate,
            "ttft_mean": sum(times) / len(times),
            "ttft_p50": percentile(0.5),
            "ttft_p90": percentile(0.9),
            "ttft_p99": percentile(0.99),
            "imbalance": self.imbalance,
        }


def replay(
    policy: str,
    requests: list[Request],
    pods: int,
    model: PodModel,
    seed: int = 0,
    routers: int = 1,
    redis_away: tuple[float, float] | None = None,
) -> Outcome:
    """Replay the requests until the last one ends. The same arguments give the same outcome.

    Each request goes to a random one of the `routers`. Fairlead's pods show a prompt to the index when it waits, others when it
    is computed.
    `redis_away`: start and end, in seconds of the run, of an outage of Redis. It affects only the policy `fairlead`.
    """
    draw = random.Random(seed)
    engine: Engine = "fairlead" if policy in OURS else "fcfs"
    phases = [draw.random() * max(0.0, model.report_seconds) for _ in range(pods)]
    fleet = Fleet([Pod(model, phase, engine) for phase in phases], BLOCK_TOKENS, routers)
    make: Maker = POLICIES[policy]
    if policy == "fairlead" and redis_away is not None:
        window = redis_away

        def make(fleet: Fleet, inflight: InflightRequests, draw: random.Random) -> Policy:
            return WithRedisOutage(fleet, inflight, draw, window)

    choosers = [make(fleet, inflight, draw) for inflight in fleet.inflight_by_router]
    run = _Run(fleet, Outcome(policy, [0.0] * len(requests)))
    for position, request in enumerate(requests):
        run.advance(request.at)
        router = draw.randrange(routers) if routers > 1 else 0
        pod, predicted = choosers[router].choose(request)
        run.send(position, fleet.add_request(request, router, pod, predicted, choosers[router].reserves))
    run.advance(math.inf)
    run.outcome.computed = [pod.computed for pod in fleet.pods]
    run.outcome.hit_rate = run.cached / sum(request.prompt_tokens for request in requests)
    return run.outcome


class _Run:
    """The pods over time: prefills that end, and requests that end."""

    def __init__(self, fleet: Fleet, outcome: Outcome) -> None:
        self.outcome = outcome
        self.cached = 0
        """Prompt tokens from the caches."""
        self._fleet = fleet
        self._flights: list[dict[int, tuple[int, InflightRequest]]] = [{} for _ in fleet.pods]  # by pod and number: position, request
        self._events: list[tuple[float, int, InflightRequest, int | None]] = []  # time, order, and the position if a prefill ends
        self._order = itertools.count()

    def send(self, position: int, flight: InflightRequest) -> None:
        """Deliver a request to its pod, now."""
        now = flight.request.at
        number, begun = self._fleet.pods[flight.pod].add(flight.request, now)
        self._flights[flight.pod][number] = position, flight
        self._follow(flight.pod, begun)

    def advance(self, until: float) -> None:
        """Apply the events up to a moment."""
        events, fleet = self._events, self._fleet
        while events and events[0][0] <= until:
            now, _, flight, position = heapq.heappop(events)
            if position is None:
                fleet.end_request(flight)
                continue
            model = fleet.pods[flight.pod].model
            first_token_at = now + model.step_seconds
            self.outcome.ttft[position] = first_token_at - flight.request.at
            fleet.record_first_token(flight)
            self._push(first_token_at + flight.request.output_tokens * model.token_seconds, flight, None)
            self._follow(flight.pod, fleet.pods[flight.pod].finish(now))

    def _follow(self, pod: int, begun: Prefill | None) -> None:
        self._fleet.update_index(pod)
        if begun is not None:
            position, flight = self._flights[pod].pop(begun.number)
            self.cached += begun.cached
            self._push(begun.ends_at, flight, position)

    def _push(self, at: float, flight: InflightRequest, position: int | None) -> None:
        heapq.heappush(self._events, (at, next(self._order), flight, position))

"""Replay of a trace with one policy: the pod of each request, and what pods and index know at that time."""

import heapq
import itertools
import random
from dataclasses import dataclass, field

from fairlead.simulate.fleet import Fleet, InflightRequest, InflightRequests
from fairlead.simulate.ours import WithRedisOutage
from fairlead.simulate.pods import Pod, PodModel, Served
from fairlead.simulate.policies import POLICIES, Maker, Policy
from fairlead.simulate.trace import BLOCK_TOKENS, Request


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
    """Replay the requests. The same arguments give the same outcome.

    The index learns a prompt's blocks when its prefill ends, as from a real worker. Each request goes to a random one of the `routers`.
    `redis_away`: start and end, in seconds of the run, of an outage of Redis. It affects only the policy `fairlead`.
    """
    draw = random.Random(seed)
    fleet = Fleet([Pod(model, draw.random() * max(0.0, model.report_seconds)) for _ in range(pods)], BLOCK_TOKENS, routers)
    make: Maker = POLICIES[policy]
    if policy == "fairlead" and redis_away is not None:
        window = redis_away

        def make(fleet: Fleet, inflight: InflightRequests, draw: random.Random) -> Policy:
            return WithRedisOutage(fleet, inflight, draw, window)

    choosers = [make(fleet, inflight, draw) for inflight in fleet.inflight_by_router]
    outcome = Outcome(policy)
    events: list[tuple[float, int, int, InflightRequest, Served, int]] = []  # (time, order, kind, request, served, router)
    order = itertools.count()
    cached = 0
    for request in requests:
        while events and events[0][0] <= request.at:
            _, _, what, flight, served, router = heapq.heappop(events)
            if what == 0:
                fleet.record_first_token(flight, served)
                heapq.heappush(events, (served.done_at, next(order), 1, flight, served, router))
            else:
                fleet.end_request(flight, router)
        router = draw.randrange(routers) if routers > 1 else 0
        pod, predicted = choosers[router].choose(request)
        flight = fleet.add_request(request, router, pod, predicted, choosers[router].reserves)
        served = fleet.pods[pod].serve(request)
        heapq.heappush(events, (served.first_token_at, next(order), 0, flight, served, router))
        outcome.ttft.append(served.ttft)
        cached += served.cached
    outcome.computed = [pod.computed for pod in fleet.pods]
    outcome.hit_rate = cached / sum(request.prompt_tokens for request in requests)
    return outcome

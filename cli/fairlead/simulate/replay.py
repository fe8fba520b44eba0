"""Plays a trace through one policy: who gets each request, and what the pods and the index know by then."""

import heapq
import itertools
import random
from dataclasses import dataclass, field

from fairlead.simulate.fleet import Account, Fleet, Flight
from fairlead.simulate.ours import UnderLoss
from fairlead.simulate.pods import Pod, PodModel, Served
from fairlead.simulate.policies import POLICIES, Maker, Policy
from fairlead.simulate.trace import BLOCK_TOKENS, Request


@dataclass(slots=True)
class Outcome:
    """Per request: seconds to the first token. Per pod: prompt tokens computed. Over all: share of prompt tokens that were cached."""

    policy: str
    ttft: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    hit_rate: float = 0.0

    @property
    def imbalance(self) -> float:
        """The busiest pod's prefill over the mean."""
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
    """Same arguments, same outcome. The index learns of a prompt's blocks when its prefill ends, as from a real worker.

    Each request comes to one of the `routers` by chance. `redis_away`: seconds of the run from which and until which Redis is lost to the
    policy `fairlead`; others are not touched, for they have none.
    """
    draw = random.Random(seed)
    fleet = Fleet([Pod(model, draw.random() * max(0.0, model.report_seconds)) for _ in range(pods)], BLOCK_TOKENS, routers)
    make: Maker = POLICIES[policy]
    if policy == "fairlead" and redis_away is not None:
        window = redis_away

        def make(fleet: Fleet, account: Account, draw: random.Random) -> Policy:
            return UnderLoss(fleet, account, draw, window)

    choosers = [make(fleet, account, draw) for account in fleet.accounts]
    outcome = Outcome(policy)
    events: list[tuple[float, int, int, Flight, Served, int]] = []  # time, order, what, whose, router
    order = itertools.count()
    cached = 0
    for request in requests:
        while events and events[0][0] <= request.at:
            _, _, what, flight, served, router = heapq.heappop(events)
            if what == 0:
                fleet.started(flight, served)
                heapq.heappush(events, (served.done_at, next(order), 1, flight, served, router))
            else:
                fleet.ended(flight, router)
        router = draw.randrange(routers) if routers > 1 else 0
        pod, predicted = choosers[router].choose(request)
        flight = fleet.sent(request, router, pod, predicted, choosers[router].reserves)
        served = fleet.pods[pod].serve(request)
        heapq.heappush(events, (served.first_token_at, next(order), 0, flight, served, router))
        outcome.ttft.append(served.ttft)
        cached += served.cached
    outcome.computed = [pod.computed for pod in fleet.pods]
    outcome.hit_rate = cached / sum(request.prompt_tokens for request in requests)
    return outcome

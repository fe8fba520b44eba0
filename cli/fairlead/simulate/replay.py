"""Plays a trace through one policy: who gets each request, and what the pods and the index know by then."""

import heapq
import itertools
import random
from dataclasses import dataclass, field

from fairlead.simulate.pods import Pod, PodModel, Served
from fairlead.simulate.policies import POLICIES, Fleet, Flight
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


def replay(policy: str, requests: list[Request], pods: int, model: PodModel, seed: int = 0) -> Outcome:
    """Same arguments, same outcome. The index learns of a prompt's blocks when its prefill ends, as from a real worker."""
    draw = random.Random(seed)
    fleet = Fleet([Pod(model, draw.random() * max(0.0, model.report_seconds)) for _ in range(pods)], BLOCK_TOKENS)
    choose = POLICIES[policy](fleet, draw)
    outcome = Outcome(policy)
    events: list[tuple[float, int, int, Flight, Served]] = []  # time, order, what, whose
    order = itertools.count()
    cached = 0
    for request in requests:
        while events and events[0][0] <= request.at:
            _, _, what, flight, served = heapq.heappop(events)
            if what == 0:
                fleet.started(flight, served)
                heapq.heappush(events, (served.done_at, next(order), 1, flight, served))
            else:
                fleet.ended(flight)
        pod, predicted = choose.choose(request)
        flight = fleet.sent(request, pod, predicted)
        served = fleet.pods[pod].serve(request)
        heapq.heappush(events, (served.first_token_at, next(order), 0, flight, served))
        outcome.ttft.append(served.ttft)
        cached += served.cached
    outcome.computed = [pod.computed for pod in fleet.pods]
    outcome.hit_rate = cached / sum(request.prompt_tokens for request in requests)
    return outcome

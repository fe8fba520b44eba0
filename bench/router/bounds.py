"""What no routing could be better than, in the simulator.

`goodput`: an oracle admits whole sessions. `p99`: lower bounds of its TTFT. `redis`: an outage with known prefixes. Each bound relaxes
constraints, so no policy can reach more. Oracles know the future or the exact index.
"""

import heapq
import math
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from bench.common.report import make_parser, write_report
from bench.router.load_sweep import PODS, POLICIES, reach
from fairlead.simulate import ours
from fairlead.simulate.catalog import load, offered_load
from fairlead.simulate.outcome import Outcome
from fairlead.simulate.pods import PodModel
from fairlead.simulate.replay import Scenario, replay
from fairlead.simulate.workloads.agents import SYSTEM_BLOCKS
from fairlead.simulate.workloads.request import Request, necessary_each
from fairlead_index import score

ADMITTED = (0.85, 1.0, 1.2)
"""Loads of the sessions that the oracle admits."""
SECONDS = 96.0
MODEL = PodModel()


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("bound", choices=("goodput", "p99", "redis"))
    parser.add_argument("--workload", default="agents", help="a generator or a trace file (default: %(default)s)")
    parser.add_argument("--speeds", default="1.7,2.5,5", help="of goodput and redis; loads of p99 (default: %(default)s)")
    parser.add_argument("--num-prompts", type=int, help="of p99 and redis")
    options = parser.parse_args()
    speeds = [float(each) for each in options.speeds.split(",")]
    results = {f"{speed:g}": _FIND[options.bound](options.workload, speed, options.num_prompts) for speed in speeds}
    for speed, row in results.items():
        print(speed, " ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    write_report(__name__, options, results)


def find_goodput(workload: str, speed: float, count: int | None) -> dict[str, float]:
    """Return good requests per second: of our routers, of those behind an oracle that admits some of the sessions, and the upper bound.

    The bound: the turns with the least work that fill the pods, each with the context of the turns before it cached.
    """
    (requests,) = load(workload, count=None, speed=speed, pods=PODS, model=MODEL, seeds=[0], seconds=SECONDS)
    offered = offered_load(requests, PODS, MODEL)
    row = {"load": offered, "turns": _goodput(requests, requests), "sessions": 0.0}
    sessions = {_session(request): random.Random(number).random() for number, request in enumerate(requests)}
    for wanted in ADMITTED:
        admitted = [request for request in requests if sessions[_session(request)] < wanted / offered]
        row["sessions"] = max(row["sessions"], _goodput(admitted, requests))
    works = sorted(MODEL.work_seconds(request, tokens) for request, tokens in zip(requests, necessary_each(requests), strict=True))
    left, good = PODS * (requests[-1].at - requests[0].at), 0
    while good < len(works) and works[good] <= left:
        left -= works[good]
        good += 1
    return row | {"at most": good / (requests[-1].at - requests[0].at)}


def _session(request: Request) -> int:
    """Return the first block that only the turns of one session share."""
    return request.blocks[SYSTEM_BLOCKS]


def _goodput(admitted: list[Request], requests: Sequence[Request]) -> float:
    outcome = replay("fairlead", admitted, Scenario(PODS, MODEL, has_bounds=True))
    return outcome.met() / (requests[-1].at - requests[0].at)


def find_p99(workload: str, wanted: float, count: int | None) -> dict[str, float]:
    """Return mean and p99 TTFT with parts of the price, those of the peer with the lowest p99, and two lower bounds of the p99."""
    _, (requests,) = reach(workload, wanted, 1, count or 2000, MODEL)
    runs: dict[str, Outcome] = {policy: replay(policy, requests, Scenario(PODS, MODEL)) for policy in POLICIES}
    figures = {policy: outcome.figures() for policy, outcome in runs.items()}
    own = figures.pop("fairlead")
    tail = min(figures.values(), key=lambda each: each["ttft_p99"])
    works = [tokens / MODEL.rate for tokens in necessary_each(requests)]
    front: dict[str, float] = {}
    for share in (0.0, 0.5):
        with _price(share):
            found = replay("fairlead", requests, Scenario(PODS, MODEL)).figures()
        front |= {f"mean, price x {share:g}": found["ttft_mean"], f"p99, price x {share:g}": found["ttft_p99"]}
    return front | {
        "mean": own["ttft_mean"],
        "p99": own["ttft_p99"],
        "peer's mean": tail["ttft_mean"],
        "peer's p99": tail["ttft_p99"],
        "p99 alone": sorted(works)[int(0.99 * len(works))],
        "p99 pooled": pooled_bound([request.at for request in requests], works),
    }


def _price(share: float) -> AbstractContextManager[Any]:
    """Let the score count a share of its price."""
    pending, arrivals = score._pending, score.delayed_arrivals
    return patch.multiple(
        score,
        _pending=lambda worker: share * pending(worker),
        delayed_arrivals=lambda worker, work: share * arrivals(worker, work),
    )


def pooled_bound(times: Sequence[float], works: Sequence[float], pods: int = PODS, late: float = 0.01) -> float:
    """Return a lower bound of the TTFT that all but the share `late` of the requests can have.

    All pods together compute `pods` seconds of work in a second. The requests that arrive from `s` to `t` are done by `t` plus the bound,
    without the longest ones, which may be late.
    """
    most, allowed = 0.0, math.ceil(late * len(times))
    for first in range(0, len(times), max(1, len(times) // 200)):
        longest: list[float] = []
        total = 0.0
        for at, work in zip(times[first:], works[first:], strict=True):
            heapq.heappush(longest, work)
            total += heapq.heappop(longest) if len(longest) > allowed else 0.0
            most = max(most, total / pods - (at - times[first]))
    return most


def find_redis(workload: str, speed: float, count: int | None) -> dict[str, float]:
    """Return the mean TTFT with four routers and Redis away for a quarter of the run, over that of one router with fresh loads."""
    (requests,) = load(workload, count=count, speed=speed, pods=PODS, model=MODEL, seeds=[0])
    span = requests[-1].at - requests[0].at
    fresh = replay("fairlead", requests, Scenario(PODS, replace(MODEL, report_seconds=0.0))).figures()["ttft_mean"]
    scenario = Scenario(PODS, replace(MODEL, report_seconds=1.0), 4, (0.5 * span, 0.75 * span))
    known = patch.multiple(ours, copy_table=lambda table: table, expect_at_homes=lambda held, *_: held)
    row = {"fresh": fresh}
    for name, context in (("away", nullcontext()), ("away, prefixes known", known)):
        with context:
            row[name] = replay("fairlead", requests, scenario).figures()["ttft_mean"]
    return row


_FIND = {"goodput": find_goodput, "p99": find_p99, "redis": find_redis}


if __name__ == "__main__":
    main()

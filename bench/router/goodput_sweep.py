"""Goodput below and beyond capacity in the simulator, with and without the rule "cached prompts first".

Every run lasts as long, because caches begin cold. The seeds are other requests of a generator, and other start times of a trace.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from bench.common.report import make_parser, write_report
from bench.router.load_sweep import PODS
from fairlead.simulate.catalog import GENERATORS, load, offered_load
from fairlead.simulate.outcome import Outcome
from fairlead.simulate.pods import PodModel
from fairlead.simulate.replay import Scenario, replay
from fairlead.simulate.workloads.request import Request, necessary_each
from fairlead_router.serving.cached_first import CachedFirst

LONGEST_SHARE = 0.1
"""Share of the requests, those with the most uncached tokens, whose goodput is shown on its own."""
MODEL = PodModel()


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("workloads", nargs="+", metavar="NAME|FILE", help=f"{', '.join(GENERATORS)}, or a trace file")
    parser.add_argument("--speeds", default="0.7,1,1.5,2,3", help="as of `fairlead simulate`; the load is printed (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=96.0, help="of each run (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="seeds of each cell (default: %(default)s)")
    parser.add_argument("--pods", type=int, default=PODS, help="default: %(default)s")
    parser.add_argument("--routers", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    print(f"{'workload':<20} {'load':>5} {'without':>8} {'with':>7} {'ratio':>6} {'worst':>6} {'longest tenth, without / with':>30}")
    for workload in options.workloads:
        name = Path(workload).stem
        rows = results[name] = []
        for speed in map(float, options.speeds.split(",")):
            seeds = list(range(options.repeats))
            played = load(workload, count=None, speed=speed, pods=options.pods, model=MODEL, seeds=seeds, seconds=options.seconds)
            row = {"load": fmean(offered_load(requests, options.pods, MODEL) for requests in played)}
            for side, context in (("without", _without()), ("with", nullcontext())):
                with context:
                    row |= _measure(side, played, Scenario(options.pods, MODEL, options.routers, has_bounds=True))
            ratios = [row[f"with {seed}"] / row[f"without {seed}"] for seed in seeds]
            row |= {"ratio": row["with"] / row["without"], "worst": min(ratios)}
            rows.append(row)
            numbers = f"{row['without']:>8.2f} {row['with']:>7.2f} {row['ratio']:>6.3f} {row['worst']:>6.3f}"
            longest = f"{row['without, longest']:.1%} / {row['with, longest']:.1%}"
            print(f"{name:<20} {row['load']:>5.2f} {numbers} {longest:>30}", flush=True)
    write_report(__name__, options, results)


def _without() -> AbstractContextManager[Any]:
    return patch.object(CachedFirst, "next_turn", lambda *_: 0.0)


def _measure(side: str, played: list[list[Request]], scenario: Scenario) -> dict[str, float]:
    """Return good requests per second of each seed and on average, and the share of the longest that were good."""
    outcomes = [replay("fairlead", requests, scenario, seed) for seed, requests in enumerate(played)]
    row = {f"{side} {seed}": outcome.figures()["goodput"] for seed, outcome in enumerate(outcomes)}
    longest = fmean(_good_longest(outcome, requests) for outcome, requests in zip(outcomes, played, strict=True))
    return {side: fmean(row.values()), f"{side}, longest": longest} | row


def _good_longest(outcome: Outcome, requests: list[Request]) -> float:
    tokens = necessary_each(requests)
    longest = sorted(range(len(requests)), key=tokens.__getitem__)[-max(1, round(LONGEST_SHARE * len(requests))) :]
    return fmean(
        outcome.ttft[each] <= outcome.objectives[each].ttft and outcome.itl[each] <= outcome.objectives[each].itl for each in longest
    )


if __name__ == "__main__":
    main()

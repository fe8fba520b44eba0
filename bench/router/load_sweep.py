"""Fairlead over the best peer policy on six workloads, from 0.3 to 3 times capacity.

A ratio is that of the worst seed, to the peer that is best at that load. The load of a trace is set by its speed.
"""

from pathlib import Path
from statistics import fmean

from bench.common.report import make_parser, write_report
from fairlead.simulate.catalog import GENERATORS, load, offered_load
from fairlead.simulate.pods import PodModel
from fairlead.simulate.replay import Scenario, replay
from fairlead.simulate.report import Cell
from fairlead.simulate.workloads.request import Request

PODS = 16
FIGURES = ("ttft_mean", "ttft_p99", "itl_mean")
"""Seconds each."""
POLICIES = ("fairlead", "bounded-load", "sglang-like", "dynamo-like", "llm-d-like")
MOST_TRIES = 5
"""Speeds tried until the load is within 2 % of the wanted one. Agents begin one after the other, so short runs do not reach high loads."""

Row = dict[str, float]
"""`load`, and the ratio and our value of each figure."""


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("workloads", nargs="+", metavar="NAME|FILE", help=f"{', '.join(GENERATORS)}, or a trace file")
    parser.add_argument("--loads", default="0.3,0.7,1,1.5,3", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="seeds of each cell (default: %(default)s)")
    parser.add_argument("--num-prompts", type=int, default=2000, help="requests of each run (default: %(default)s)")
    options = parser.parse_args()
    results: dict[str, list[Row]] = {}
    print(f"{'workload':<24} {'load':>5} {'mean s':>7} {'ratio':>6} {'p99 s':>7} {'ratio':>6} {'ITL s':>7} {'ratio':>6}  best peer")
    for workload in options.workloads:
        name = Path(workload).stem
        rows = results[name] = []
        for wanted in map(float, options.loads.split(",")):
            cell = _play(workload, wanted, options.repeats, options.num_prompts)
            row = _compare(cell)
            rows.append(row)
            numbers = " ".join(f"{row[figure]:>7.3g} {row[figure + '_ratio']:>6.2f}" for figure in FIGURES)
            print(f"{name:<24} {row['load']:>5.2f} {numbers}  {cell.best_peer('ttft_mean')}", flush=True)
    write_report(__name__, options, results)


def _play(workload: str, wanted: float, repeats: int, count: int) -> Cell:
    model = PodModel()
    speed, played = reach(workload, wanted, repeats, count, model)
    runs = {policy: [replay(policy, requests, Scenario(PODS, model), seed) for seed, requests in enumerate(played)] for policy in POLICIES}
    return Cell(speed, fmean(offered_load(requests, PODS, model) for requests in played), count, runs)


def reach(workload: str, wanted: float, repeats: int, count: int, model: PodModel) -> tuple[float, list[list[Request]]]:
    """Return the speed at which the workload has the wanted load, and the requests of each run."""
    speed, played = wanted, []
    for _ in range(MOST_TRIES):
        played = load(workload, count=count, speed=speed, pods=PODS, model=model, seeds=list(range(repeats)))
        found = fmean(offered_load(requests, PODS, model) for requests in played)
        if abs(found - wanted) <= 0.02 * wanted:
            break
        speed *= wanted / found
    return speed, played


def _compare(cell: Cell) -> Row:
    row: Row = {"load": cell.load, "speed": cell.speed}
    for figure in FIGURES:
        ratio = cell.ratio("fairlead", cell.best_peer(figure), figure)
        assert ratio is not None, "both were played"
        row[figure + "_ratio"] = ratio
        row[figure] = fmean(outcome.figures()[figure] for outcome in cell.runs["fairlead"])
    return row

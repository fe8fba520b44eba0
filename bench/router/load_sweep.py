"""Fairlead over the best peer policy on six workloads, from 0.3 to 3 times capacity.

A ratio is that of the worst seed, to the peer that is best at that load. The load of a trace is set by its speed.
"""

import math
from html import escape
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

_WIDTH, _HEIGHT, _COLUMNS = 420, 260, 3
_EDGE, _TOP = 44, 40
_MOST = 1.25
"""Highest ratio of the plot."""
_COLORS = {"ttft_mean": "#1f5fa8", "ttft_p99": "#d62728"}

Row = dict[str, float]
"""`load`, and the ratio and our value of each figure."""


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("workloads", nargs="+", metavar="NAME|FILE", help=f"{', '.join(GENERATORS)}, or a trace file")
    parser.add_argument("--loads", default="0.3,0.7,1,1.5,3", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="seeds of each cell (default: %(default)s)")
    parser.add_argument("--num-prompts", type=int, default=2000, help="requests of each run (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the ratios as SVG")
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
        if options.plot:
            options.plot.write_text(_draw(results))
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


def _draw(results: dict[str, list[Row]]) -> str:
    """Return an SVG with a panel for each workload: the ratios over the load, which is logarithmic."""
    lines = -(-len(results) // _COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_COLUMNS * _WIDTH}" height="{_TOP + lines * _HEIGHT}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        '<text x="12" y="24" font-size="15">TTFT of Fairlead over that of the best peer, worst of the seeds, over the offered load: '
        f'<tspan fill="{_COLORS["ttft_mean"]}">mean</tspan>, <tspan fill="{_COLORS["ttft_p99"]}">p99</tspan></text>',
    ]
    for number, (name, rows) in enumerate(results.items()):
        parts += _panel(name, rows, number % _COLUMNS * _WIDTH, _TOP + number // _COLUMNS * _HEIGHT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, rows: list[Row], left: int, top: int) -> list[str]:
    first, last = math.log(min(row["load"] for row in rows)), math.log(max(row["load"] for row in rows))

    def x(load: float) -> float:
        return left + _EDGE + (math.log(load) - first) / max(last - first, 1e-9) * (_WIDTH - 1.5 * _EDGE)

    def y(ratio: float) -> float:
        return top + _HEIGHT - _EDGE - min(ratio, _MOST) / _MOST * (_HEIGHT - 2 * _EDGE)

    parts = [f'<text x="{left + _EDGE}" y="{top + 28}">{escape(name)}</text>']
    for ratio in (0.0, 0.25, 0.5, 0.75, 1.0, 1.25):
        color = "#6b7280" if ratio == 1 else "#e3e6ea"
        parts.append(
            f'<line x1="{left + _EDGE}" x2="{left + _WIDTH - _EDGE // 2}" y1="{y(ratio):.1f}" y2="{y(ratio):.1f}" stroke="{color}"/>'
        )
        parts.append(f'<text x="{left + _EDGE - 6}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio:g}</text>')
    parts += [f'<text x="{x(row["load"]):.1f}" y="{top + _HEIGHT - 24}" text-anchor="middle">{row["load"]:.2g}</text>' for row in rows]
    for figure, color in _COLORS.items():
        points = " ".join(f"{x(row['load']):.1f},{y(row[figure + '_ratio']):.1f}" for row in rows)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
    return parts

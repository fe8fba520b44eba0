"""The printed table."""

from dataclasses import dataclass

from rich.markup import escape

from fairlead.console import fit_table, make_console
from fairlead.simulate.outcome import Outcome
from fairlead.simulate.policies import POLICIES

FIGURES = {"ttft_mean": "mean", "ttft_p99": "p99"}

OPTIONAL = ("pod hours", "max/mean", "p90", "p50", "load", "ITL ms", "p99/best", "lost")
"""Columns that a narrow terminal does without, the first first."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The runs of each policy at one speed. `load`: see `offered_load`."""

    speed: float
    load: float
    requests: int
    runs: dict[str, list[Outcome]]

    def best_peer(self, figure: str) -> str | None:
        peers = {policy: average(outcomes)[figure] for policy, outcomes in self.runs.items() if POLICIES[policy].is_peer}
        return min(peers, key=peers.__getitem__) if peers else None

    def ratio(self, policy: str, other: str | None, figure: str) -> float | None:
        """Return the worst ratio of any pair of runs with the same requests; None without a run of both."""
        pairs = zip(self.runs.get(policy, []), self.runs.get(other or "", []), strict=False)
        return max((one.figures()[figure] / max(two.figures()[figure], 1e-9) for one, two in pairs), default=None)


def average(outcomes: list[Outcome]) -> dict[str, float]:
    """Return each figure's mean over the runs."""
    each = [outcome.figures() for outcome in outcomes]
    return {name: sum(figures[name] for figures in each) / len(each) for name in each[0]}


def show(cells: list[Cell], title: str) -> None:
    """Print the table. Ratios are of the worst run, to the best peer at that speed. Goodput is that of all classes, then of each."""
    rows = []
    by_class: list[str] = []
    for cell in cells:
        for policy, outcomes in cell.runs.items():
            figures = average(outcomes)
            by_class = [name for name in figures if name.startswith("goodput_")]
            ratios = [cell.ratio(policy, cell.best_peer(figure), figure) for figure in FIGURES]
            numbers = [f"{figures[name]:.2f}" for name in ("ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99")]
            numbers += [f"{1000 * figures['itl_mean']:.1f}", f"{figures['imbalance']:.2f}", f"{figures['lost']:.0f}"]
            numbers += [f"{figures['good_share']:.1%}", *(f"{figures[name]:.2f}" for name in ("goodput", *by_class))]
            numbers.append(f"{figures['pod_hours']:.2f}")
            numbers += ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            rows.append([policy, f"{cell.speed:g}", f"{cell.load:.2f}", f"{figures['hit_rate']:.1%}", *numbers])
    headers = ["policy", "speed", "load", "hits", "TTFT s", "p50", "p90", "p99", "ITL ms", "max/mean", "lost", "good", "goodput/s"]
    headers += [f"{escape(name.removeprefix('goodput_'))}/s" for name in by_class] + ["pod hours", "mean/best", "p99/best"]
    console = make_console()
    console.print(title, markup=False)
    console.print(fit_table(headers, rows, left=1, width=console.width, optional=OPTIONAL))

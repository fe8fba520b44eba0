"""The printed table, and the targets that the runs can check."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.markup import escape

from fairlead.console import fit_table, make_console
from fairlead.simulate.outcome import Outcome
from fairlead.simulate.policies import POLICIES

LIMIT = 1.0
"""Upper limit of Fairlead's mean and p99 TTFT divided by the best peer's."""
FIGURES = {"ttft_mean": "mean", "ttft_p99": "p99"}
OVERLOAD, OVERLOAD_GOODPUT = 1.4, 1.3
"""From this load on, the goodput must be this many times that of the same score with first come, first served."""

AUTOSCALED = 1.5
"""Lower limit of the good answers per pod-hour of an autoscaled fleet divided by those of a static one with 1 % more goodput at most."""

OPTIONAL = ("pod hours", "max/mean", "p90", "p50", "load", "ITL ms", "p99/best", "lost")
"""Columns that a narrow terminal does without, the first first."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The runs of each policy at one speed. `load`: see `offered_load`."""

    speed: float
    load: float
    requests: int
    runs: dict[str, list[Outcome]]
    static: dict[str, list[Outcome]] = field(default_factory=dict)
    """With an autoscaler: for each run, the static fleet to compare it with (`find_static_fleet`)."""

    def best_peer(self, figure: str) -> str | None:
        peers = {policy: average(outcomes)[figure] for policy, outcomes in self.runs.items() if POLICIES[policy].is_peer}
        return min(peers, key=peers.__getitem__) if peers else None

    def ratio(self, policy: str, other: str | None, figure: str, worst: Callable[..., float | None] = max) -> float | None:
        """Return the worst ratio of any pair of runs with the same requests; None without a run of both."""
        pairs = zip(self.runs.get(policy, []), self.runs.get(other or "", []), strict=False)
        return worst((one.figures()[figure] / max(two.figures()[figure], 1e-9) for one, two in pairs), default=None)


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


def check_targets(cells: list[Cell]) -> list[dict[str, Any]]:
    """Return each target that the runs can check: its name, the measured ratio, the limit, and whether it is met."""
    found = []
    for cell in cells:
        prefix = f"simulate_{cell.speed:g}x" if len(cells) > 1 else "simulate"
        checks = [("fairlead", cell.best_peer(figure), figure, f"{prefix}_{figure}") for figure in FIGURES]
        checks.append(("fairlead-no-redis", "least-load", "ttft_mean", f"{prefix}_no_redis_ttft_mean"))
        for policy, other, figure, name in checks:
            ratio = cell.ratio(policy, other, figure)
            if ratio is not None:
                found.append(_target(f"{name}_over_{other}", ratio, LIMIT, ratio <= LIMIT))
        goodput = cell.ratio("fairlead", "fairlead-fcfs", "goodput", min)
        if goodput is not None and cell.load >= OVERLOAD:
            found.append(_target(f"{prefix}_goodput_over_fairlead-fcfs", goodput, OVERLOAD_GOODPUT, goodput >= OVERLOAD_GOODPUT))
        for policy, static in cell.static.items():
            pairs = list(zip(cell.runs[policy], static, strict=True))
            ratio = min(one.figures()["good_per_pod_hour"] / max(two.figures()["good_per_pod_hour"], 1e-9) for one, two in pairs)
            sizes = "/".join(str(len(two.computed)) for two in static)
            name = f"{prefix}_{policy}_good_per_pod_hour_over_{sizes}_static_pods"
            found.append(_target(name, ratio, AUTOSCALED, ratio >= AUTOSCALED))
    return found


def _target(name: str, measured: float, limit: float, met: bool) -> dict[str, Any]:
    return {"name": name, "measured": measured, "limit": limit, "met": met}

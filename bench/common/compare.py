"""Interleaved runs of several sides, ratios beside their targets, and the printed table: shared by the engine's benchmarks."""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bench.common.report import make_parser

Figures = dict[str, float]


def parse_options(module: str, description: str | None, *, repeats: int = 3) -> argparse.Namespace:
    """Return the options `--quick --repeats --threads --json`, and set torch's threads. `module`: the benchmark's `__name__`."""
    parser = make_parser(module, description)
    parser.add_argument("--quick", action="store_true", help="smaller workload and model, one repeat: shows that it runs, measures nothing")
    parser.add_argument("--repeats", type=int, default=repeats, help="measured runs of each side (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))), help="of torch (default: %(default)s)")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.repeats = 1
    torch.set_num_threads(chosen.threads)
    return chosen


def take_turns(sides: Mapping[str, Callable[[], Figures]], repeats: int, *, warm: bool = True) -> dict[str, list[Figures]]:
    """Run every side once in each repeat, in alternating order, so that a busy machine slows all of them.

    `warm`: also run each side once before, without recording it.
    """
    runs: dict[str, list[Figures]] = {name: [] for name in sides}
    for repeat in range(-1 if warm else 0, repeats):
        for name in sides if repeat % 2 else reversed(list(sides)):
            figures = sides[name]()
            if repeat >= 0:
                runs[name].append(figures)
    return runs


def medians(runs: dict[str, list[Figures]]) -> dict[str, Figures]:
    """Return the median of each figure, by side."""
    return {name: {key: median(run[key] for run in found) for key in found[0]} for name, found in runs.items()}


@dataclass(frozen=True)
class Target:
    """A ratio of one figure between two sides: better / worse if more is better, else worse / better."""

    name: str
    figure: str
    better: str
    worse: str
    least: float
    more_is_better: bool = False

    def ratios(self, runs: dict[str, list[Figures]]) -> list[float]:
        """Return the ratio of each repeat."""
        pairs = zip(runs[self.better], runs[self.worse], strict=True)
        values = [(a[self.figure], b[self.figure]) for a, b in pairs]
        return [a / b if self.more_is_better else b / a for a, b in values]


def print_report(about: dict[str, object], runs: dict[str, list[Figures]], targets: list[Target]) -> dict[str, Any]:
    """Print medians side by side and each ratio with its target. Return all of it for the JSON report."""
    table = medians(runs)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    figures = list(next(iter(table.values())))
    wide = max(map(len, table))
    print(" " * wide, *(f"{figure:>16}" for figure in figures))
    for side, row in table.items():
        print(f"{side:{wide}}", *(f"{row[figure]:16.3g}" if row[figure] < 1 else f"{row[figure]:16.1f}" for figure in figures))
    verdicts: dict[str, object] = {}
    for target in targets:
        ratios = target.ratios(runs)
        middle = median(ratios)
        print(
            f"{target.name} {middle:.2f} {target.least} {'ok' if middle >= target.least else 'short'} ({min(ratios):.2f}-{max(ratios):.2f})"
        )
        verdicts[target.name] = {"ratio": middle, "target": target.least, "met": middle >= target.least, "ratios": ratios}
    return {"about": about, "medians": table, "ratios": verdicts, "runs": runs}

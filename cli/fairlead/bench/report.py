"""Figures from outcomes, with the names of `vllm bench serve`'s result file, so that the two can be compared."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fairlead.bench.client import Outcome

PERCENTILES = (50, 95, 99)
DETAIL = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "latencies", "start_times", "cached_lens", "pods")
_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def compute_figures(outcomes: Sequence[Outcome], duration: float) -> dict[str, Any]:
    """Return all figures; `_ms`: milliseconds.

    TPOT is (latency - TTFT) / (tokens - 1), ITL is the gap between two events.

    `total_cached_tokens`, `cached_fraction`, `cached_lens` and `pods` are additions; all other names are vLLM's.
    """
    good = [outcome for outcome in outcomes if outcome.success]
    total_input = sum(outcome.prompt_len for outcome in good)
    total_output = sum(outcome.output_tokens for outcome in good)
    cached = sum(outcome.cached_tokens for outcome in good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "total_cached_tokens": cached,
        "cached_fraction": cached / total_input if total_input else 0.0,
        "request_throughput": len(good) / duration,
        "request_goodput": None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": _peak_tokens(good),
        "max_concurrent_requests": _peak_requests(good),
    }
    series = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [(o.latency - o.ttft) / (o.output_tokens - 1) for o in good if o.output_tokens > 1],
        "itl": [gap for outcome in good for gap in outcome.itl],
        "e2el": [outcome.latency for outcome in good],
    }
    for name, values in series.items():
        result |= _statistics(name, values)
    result |= {
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.output_tokens if outcome.success else 0 for outcome in outcomes],
        "cached_lens": [outcome.cached_tokens for outcome in outcomes],
        "pods": [outcome.pod for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itl for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.started for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }
    return result


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile with linear interpolation, as numpy does by default; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def print_figures(console: Console, result: dict[str, Any]) -> None:
    """Print the figures as a table."""
    console.print(
        f"{result['completed']} completed, {result['failed']} failed in {result['duration']:.2f} s   "
        f"{result['request_throughput']:.2f} requests/s   {result['output_throughput']:.1f} output tokens/s   "
        f"{result['total_token_throughput']:.1f} tokens/s in total"
    )
    fraction, cached, total = result["cached_fraction"], result["total_cached_tokens"], result["total_input_tokens"]
    console.print(f"cached prompt tokens: {cached} of {total} ({100 * fraction:.1f} %)")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("ms")
    for column in ("mean", "median", "p95", "p99", "std"):
        table.add_column(column, justify="right")
    for name, title in _TITLES.items():
        figures = (result[f"{key}_{name}_ms"] for key in ("mean", "median", "p95", "p99", "std"))
        table.add_row(title, *(f"{figure:.2f}" for figure in figures))
    console.print(table)
    errors = [error for error in result["errors"] if error]
    for error in errors[:5]:
        console.print(f"failed: {error}", style="red", markup=False)
    if len(errors) > 5:
        console.print(f"… and {len(errors) - 5} more", style="red")


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    figures = {
        f"mean_{name}_ms": 1000 * (statistics.fmean(values) if values else 0.0),
        f"median_{name}_ms": 1000 * percentile(values, 50),
        f"std_{name}_ms": 1000 * (statistics.pstdev(values) if values else 0.0),
    }
    return figures | {f"p{percent}_{name}_ms": 1000 * percentile(values, percent) for percent in PERCENTILES}


def _peak_tokens(good: Sequence[Outcome]) -> float:
    """Return the most token events in any second, counted from the first request."""
    if not good:
        return 0.0
    first = min(outcome.started for outcome in good)
    seconds: dict[int, int] = {}
    for outcome in good:
        at = outcome.started + outcome.ttft
        for gap in (0.0, *outcome.itl):
            at += gap
            seconds[int(at - first)] = seconds.get(int(at - first), 0) + 1
    return float(max(seconds.values()))


def _peak_requests(good: Sequence[Outcome]) -> int:
    events = sorted([(outcome.started, 1) for outcome in good] + [(outcome.started + outcome.latency, -1) for outcome in good])
    peak = now = 0
    for _, change in events:
        now += change
        peak = max(peak, now)
    return peak

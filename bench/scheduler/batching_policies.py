"""Four ways to batch one workload: static, iteration-level with whole prompts, chunked, chunked and mixed.

Real runs with random arrivals (Poisson) and prompts and outputs of very different lengths. All but static batching are settings of the
engine. Static batching is a policy of this benchmark on the same runner (`static_batching.py`). Without --quick it also draws the medians
to docs/batching.svg.
"""

import random
from functools import partial

from bench.common.bar_chart import Panel, draw
from bench.common.compare import Figures, Target, parse_options, print_report, take_turns
from bench.common.models import saved
from bench.common.report import ROOT, write_report
from bench.common.serving import PAGE_SIZE, Arrival, runner_for, serve
from bench.scheduler.static_batching import pages_for, serve_statically
from fairlead_worker.model.loader import load_model

BATCH = 8
"""Concurrent requests of every side."""
SIDES: dict[str, dict[str, object]] = {
    "iteration-level": {"chunked_prefill_size": 0, "enable_mixed_chunk": False},
    "chunked": {"chunked_prefill_size": 128, "enable_mixed_chunk": False},
    "chunked and mixed": {"chunked_prefill_size": 128},
}
TARGETS = [
    Target("batching_throughput", "output_tokens_s", "chunked and mixed", "static", 1.0, more_is_better=True),
    Target("batching_ttft_p50", "ttft_p50_ms", "chunked and mixed", "static", 1.0),
    Target("batching_itl_p99", "itl_p99_ms", "chunked and mixed", "iteration-level", 1.0),
]
"""The ratios need only be better than 1. The table shows by how much."""
PANELS = [
    Panel("output_tokens_s", "output tokens/s", "more is better"),
    Panel("ttft_p50_ms", "TTFT p50, ms", "less is better"),
    Panel("itl_p99_ms", "ITL p99, ms", "less is better"),
    Panel("padding_share", "computed for nothing, %", "less is better", 100),
]
PLOT = ROOT / "docs" / "batching.svg"


def workload(requests: int, rate: float, longest: int) -> list[Arrival]:
    """Return prompts of 16 to `longest` tokens, mostly short, with outputs of 4 to 96 tokens."""
    draw_from, now, made = random.Random(3), 0.0, []
    for _ in range(requests):
        now += draw_from.expovariate(rate)
        length = min(16 + int(draw_from.lognormvariate(4.5, 1.0)), longest)
        made.append(Arrival(now, draw_from.choices(range(500), k=length), min(4 + int(draw_from.expovariate(1 / 32)), 96)))
    return made


def main() -> None:
    chosen = parse_options(__name__, __doc__)
    shape, requests, rate = ("tiny", 8, 50.0) if chosen.quick else ("qwen3-90M", 48, 6.0)
    arrivals = workload(requests, rate, 100 if chosen.quick else 1024)
    with saved(shape) as folder:
        loaded = load_model(folder, dtype="auto")
    together = sum(-(-(len(each.prompt) + each.output) // PAGE_SIZE) for each in arrivals)
    runner = runner_for(loaded, max(pages_for(arrivals, BATCH), together))

    def side(settings: dict[str, object]) -> Figures:
        return serve(runner, arrivals, max_num_seqs=BATCH, policy="fcfs", **settings).figures()

    sides = {"static": lambda: serve_statically(runner, arrivals, BATCH).figures()}
    sides |= {name: partial(side, settings) for name, settings in SIDES.items()}
    runs = take_turns(sides, chosen.repeats)
    about = {"model": shape, "dtype": "bfloat16", "threads": chosen.threads, "requests": requests, "rate": rate, "at_once": BATCH}
    results = print_report(about, runs, TARGETS)
    write_report(__name__, chosen, results)
    if not chosen.quick:
        title = f"{requests} requests, {rate:g} a second, {BATCH} at once; {shape}, {chosen.threads} threads"
        draw(title, PANELS, results["medians"], PLOT)

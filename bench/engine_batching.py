"""Four ways to batch, one workload, one model: static, iteration-level with whole prompts, chunked, chunked and mixed.

Real runs of random arrivals (Poisson), prompts and outputs of very different lengths. All but static batching are settings of the engine;
that one is a policy of this bench on the same runner (`static_batch.py`). Writes a table, a JSON, and with --plot an SVG of the medians.
"""

import random
from pathlib import Path

from bars import Panel, draw
from compare import Figures, Target, options, report, take_turns
from fairlead_worker.model.loader import load_model
from serving import PAGE_SIZE, Arrival, runner_for, serve
from shapes import saved
from static_batch import pages_for, serve_statically

BATCH = 8
"""Requests that run at once, on all sides."""
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
"""Better at all; how much is what the table is for."""
PANELS = [
    Panel("output_tokens_s", "output tokens/s", "more is better"),
    Panel("ttft_p50_ms", "TTFT p50, ms", "less is better"),
    Panel("itl_p99_ms", "ITL p99, ms", "less is better"),
    Panel("padding_share", "computed for nothing, %", "less is better", 100),
]
PLOT = Path(__file__).parent.parent / "docs" / "batching.svg"


def workload(requests: int, rate: float, longest: int) -> list[Arrival]:
    """Prompts of 16 to `longest` tokens, mostly short; outputs of 4 to 96."""
    draw_from, now, made = random.Random(3), 0.0, []
    for _ in range(requests):
        now += draw_from.expovariate(rate)
        length = min(16 + int(draw_from.lognormvariate(4.5, 1.0)), longest)
        made.append(Arrival(now, draw_from.choices(range(500), k=length), min(4 + int(draw_from.expovariate(1 / 32)), 96)))
    return made


def main() -> None:
    chosen = options(__doc__)
    shape, requests, rate = ("tiny", 8, 50.0) if chosen.quick else ("qwen3-90M", 48, 6.0)
    arrivals = workload(requests, rate, 100 if chosen.quick else 1024)
    with saved(shape) as folder:
        loaded = load_model(folder, dtype="auto")
    together = sum(-(-(len(each.prompt) + each.output) // PAGE_SIZE) for each in arrivals)
    runner = runner_for(loaded, max(pages_for(arrivals, BATCH), together))

    def side(settings: dict[str, object]) -> Figures:
        return serve(runner, arrivals, max_num_seqs=BATCH, policy="fcfs", **settings).figures()

    sides = {"static": lambda: serve_statically(runner, arrivals, BATCH).figures()}
    sides |= {name: lambda s=settings: side(s) for name, settings in SIDES.items()}  # type: ignore[misc]  # bound now
    runs = take_turns(sides, chosen.repeats)
    about = {"model": shape, "dtype": "bfloat16", "threads": chosen.threads, "requests": requests, "rate": rate, "at_once": BATCH}
    result = report(about, runs, TARGETS, chosen.json)
    if not chosen.quick:
        draw(f"{requests} requests, {rate:g} a second, {BATCH} at once; {shape}, {chosen.threads} threads", PANELS, result["medians"], PLOT)  # type: ignore[arg-type]  # Figures


if __name__ == "__main__":
    main()

"""Stall-free batching (Sarathi-Serve): the ITL of 8 streams while a prompt of 4,096 tokens arrives.

Targets: the worst ITL of the streams with chunks is at most 1/5 of that without; total tokens per second, prompt and output, are within
10 %.
"""

from functools import partial

from bench.common.compare import Figures, Target, parse_options, print_report, take_turns
from bench.common.models import saved
from bench.common.report import write_report
from bench.common.serving import PAGE_SIZE, Arrival, runner_for, serve
from fairlead_worker.model.loader import load_model

STREAMS, PROMPT, OUTPUT, LONG = 8, 64, 160, 4096
BEFORE = 32
"""Output tokens of each stream when the long prompt arrives."""
SIDES: dict[str, dict[str, object]] = {"whole": {"chunked_prefill_size": 0}, "chunked": {}, "chunked, 256": {"chunked_prefill_size": 256}}
TARGETS = [
    Target("stall_worst_itl", "worst_itl_ms", "chunked", "whole", 5.0),
    Target("stall_total_throughput", "all_tokens_s", "chunked", "whole", 0.9, more_is_better=True),
]


def main() -> None:
    chosen = parse_options(__name__, __doc__)
    shape, output, long = ("tiny", 40, 1200) if chosen.quick else ("qwen3-90M", OUTPUT, LONG)
    arrivals = [Arrival(0.0, [(i * 37 + j * 11) % 500 for j in range(PROMPT)], output) for i in range(STREAMS)]
    arrivals.append(Arrival(0.0, [(j * 7 + j // 500) % 500 for j in range(long)], 16, after=(STREAMS - 1, BEFORE)))
    with saved(shape) as folder:
        loaded = load_model(folder, dtype="auto")
    runner = runner_for(loaded, sum(-(-(len(each.prompt) + each.output) // PAGE_SIZE) for each in arrivals))

    def side(settings: dict[str, object]) -> Figures:
        served = serve(runner, arrivals, **settings)
        itls = served.itls(range(STREAMS))
        return {
            "worst_itl_ms": 1e3 * max(itls),
            "median_itl_ms": 1e3 * sorted(itls)[len(itls) // 2],
            "long_ttft_ms": 1e3 * served.ttfts[-1],
            "all_tokens_s": sum(len(each.prompt) + each.output for each in arrivals) / served.seconds,
            "steps": served.steps,
        }

    runs = take_turns({name: partial(side, settings) for name, settings in SIDES.items()}, chosen.repeats)
    about = {"model": shape, "dtype": "bfloat16", "threads": chosen.threads, "streams": STREAMS, "output": output, "long prompt": long}
    write_report(__name__, chosen, print_report(about, runs, TARGETS))

"""Batched prefill of several prompts against one prompt per step: TTFT, ITL, throughput.

The workload is that of the document that this engine started from: GPT-2's 124M shape on a CPU, 32 concurrent streams with prompts of 4
tokens that share no prefix, 8 new tokens each, with the prefix cache on. As there, a step is either prefill or decode
(`--no-enable-mixed-chunk`) on both sides, and the only difference is `--prefill-max-requests 1`. Mixed steps, the default, are shown
with and without that limit too.
"""

from functools import partial

import torch

from bench.common.compare import Figures, Target, parse_options, print_report, take_turns
from bench.common.models import saved
from bench.common.report import write_report
from bench.common.serving import Arrival, runner_for, serve
from fairlead_worker.model.loader import load_model

STREAMS, PROMPT, OUTPUT = 32, 4, 8
SIDES: dict[str, dict[str, object]] = {
    "micro-batched": {"enable_mixed_chunk": False},
    "one at a time": {"enable_mixed_chunk": False, "prefill_max_requests": 1},
    "mixed": {},
    "mixed, one at a time": {"prefill_max_requests": 1},
}
TARGETS = [
    Target("microbatch_ttft_p50", "ttft_p50_ms", "micro-batched", "one at a time", 2.9),
    Target("microbatch_ttft_p95", "ttft_p95_ms", "micro-batched", "one at a time", 3.1),
    Target("microbatch_itl_p99", "itl_p99_ms", "micro-batched", "one at a time", 2.7),
    Target("microbatch_throughput", "output_tokens_s", "micro-batched", "one at a time", 1.5, more_is_better=True),
]


def main() -> None:
    chosen = parse_options(__name__, __doc__)
    streams = 6 if chosen.quick else STREAMS
    workload = [Arrival(0.0, [100 + i, 1, 2, 3], OUTPUT) for i in range(streams)]
    assert all(len(each.prompt) == PROMPT for each in workload)
    shape = "tiny" if chosen.quick else "gpt2-124M"
    results = {}
    with saved(shape, torch.float32) as folder:
        for dtype in ("float32",) if chosen.quick else ("float32", "bfloat16"):
            runner = runner_for(load_model(folder, dtype=dtype), 4 * STREAMS)

            def side(settings: dict[str, object], runner=runner) -> Figures:  # type: ignore[no-untyped-def]  # bound now
                return serve(runner, workload, **settings).figures()

            runs = take_turns({name: partial(side, settings) for name, settings in SIDES.items()}, chosen.repeats)
            about = {"model": shape, "dtype": dtype, "threads": chosen.threads, "streams": streams, "prompt": PROMPT, "output": OUTPUT}
            results[dtype] = print_report(about, runs, TARGETS)
    write_report(__name__, chosen, results)

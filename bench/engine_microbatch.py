"""Prefill micro-batching with the prefix cache on, against the same engine prefilling one prompt at a time: TTFT, ITL, throughput.

The workload is that of the document this engine grew from: GPT-2's 124M shape on a CPU, 32 streams at once with prompts of 4 tokens that
share nothing, 8 new tokens each. As there, a step is prefill or decodes (`--no-enable-mixed-chunk`) on both sides, and the only difference
is `--prefill-max-requests 1`. Mixed steps, the default, are shown with and without that limit too.
"""

import torch

from compare import Figures, Target, options, report, take_turns
from fairlead_worker.model.loader import load_model
from serving import Arrival, runner_for, serve
from shapes import saved

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
    chosen = options(__doc__)
    streams = 6 if chosen.quick else STREAMS
    workload = [Arrival(0.0, [100 + i, 1, 2, 3], OUTPUT) for i in range(streams)]
    assert all(len(each.prompt) == PROMPT for each in workload)
    shape = "tiny" if chosen.quick else "gpt2-124M"
    with saved(shape, torch.float32) as folder:
        for dtype in ("float32",) if chosen.quick else ("float32", "bfloat16"):
            runner = runner_for(load_model(folder, dtype=dtype), 4 * STREAMS)

            def side(settings: dict[str, object], runner=runner) -> Figures:  # type: ignore[no-untyped-def]  # bound now
                return serve(runner, workload, **settings).figures()

            runs = take_turns({name: lambda s=settings: side(s) for name, settings in SIDES.items()}, chosen.repeats)
            about = {"model": shape, "dtype": dtype, "threads": chosen.threads, "streams": streams, "prompt": PROMPT, "output": OUTPUT}
            to = chosen.json.with_stem(f"{chosen.json.stem}_{dtype}") if chosen.json else None
            report(about, runs, TARGETS, to)


if __name__ == "__main__":
    main()

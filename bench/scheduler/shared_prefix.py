"""64 simultaneous requests with a common prefix of 1,024 tokens: the prefix is computed once.

The benchmark counts computed tokens and compares times with the same engine with `dedupe_tokens=0`. It uses whole prompts, where a
step takes several prompts and would compute the prefix for each of them. With chunks (the default) a prompt longer than a step runs
alone first, so the other requests find it cached even without dedupe.
"""

from functools import partial

from bench.common.compare import Figures, Target, parse_options, print_report, take_turns
from bench.common.models import saved
from bench.common.report import write_report
from bench.common.serving import PAGE_SIZE, Arrival, runner_for, scheduler_for, serve_on
from fairlead_worker.model.loader import load_model

REQUESTS, PREFIX, OWN, OUTPUT = 64, 1024, 16, 8
WHOLE: dict[str, object] = {"chunked_prefill_size": 0}
SIDES: dict[str, dict[str, object]] = {
    "dedupe": WHOLE,
    "no dedupe": WHOLE | {"dedupe_tokens": 0},
    "chunked, dedupe": {},
    "chunked, no dedupe": {"dedupe_tokens": 0},
}


def main() -> None:
    chosen = parse_options(__name__, __doc__)
    shape, requests = ("tiny", 8) if chosen.quick else ("qwen3-90M", REQUESTS)
    prefix = [(j * 7 + j // 500) % 500 for j in range(PREFIX)]
    arrivals = [Arrival(0.0, prefix + [(i * 31 + j * 3) % 499 for j in range(OWN)], OUTPUT) for i in range(requests)]
    once = PREFIX + requests * OWN
    with saved(shape) as folder:
        loaded = load_model(folder, dtype="auto")
    runner = runner_for(loaded, requests * -(-(PREFIX + OWN + OUTPUT) // PAGE_SIZE))

    def side(settings: dict[str, object]) -> Figures:
        scheduler = scheduler_for(runner, **settings)
        served = serve_on(scheduler, runner, arrivals)
        load = scheduler.load()
        computed = load.prompt_tokens - load.cached_tokens
        return {"prompt_tokens_computed": computed, "times_once": computed / once} | served.figures()

    runs = take_turns({name: partial(side, settings) for name, settings in SIDES.items()}, chosen.repeats)
    about = {"model": shape, "dtype": "bfloat16", "threads": chosen.threads, "requests": requests, "prefix": PREFIX, "own": OWN}
    targets = [
        Target("prefix_ttft_p95", "ttft_p95_ms", "dedupe", "no dedupe", 1.0),
        Target("prefix_tokens", "prompt_tokens_computed", "dedupe", "no dedupe", 1.0),
    ]
    write_report(__name__, chosen, print_report(about | {"once": once}, runs, targets))
    most = max(run["times_once"] for name in ("dedupe", "chunked, dedupe") for run in runs[name])
    print(f"prefix_computed_once {most:.3f} 1 {'ok' if most <= 1 else 'short'}")

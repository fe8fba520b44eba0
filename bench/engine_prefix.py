"""64 simultaneous requests with one prefix of 1,024 tokens: it is computed once. Tokens computed are counted; time is taken beside the same
engine with `--dedupe-tokens 0`, with whole prompts, where a step takes several prompts and would compute the prefix for each of them.
With chunks (the default) a prompt longer than a step goes first alone, so even without dedupe the others find it cached.
"""

from compare import Figures, Target, options, report, take_turns
from fairlead_worker.model.loader import load_model
from serving import PAGE_SIZE, Arrival, runner_for, scheduler_for, serve_on
from shapes import saved

REQUESTS, PREFIX, OWN, OUTPUT = 64, 1024, 16, 8
WHOLE: dict[str, object] = {"chunked_prefill_size": 0}
SIDES: dict[str, dict[str, object]] = {
    "dedupe": WHOLE,
    "no dedupe": WHOLE | {"dedupe_tokens": 0},
    "chunked, dedupe": {},
    "chunked, no dedupe": {"dedupe_tokens": 0},
}


def main() -> None:
    chosen = options(__doc__)
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

    runs = take_turns({name: lambda s=settings: side(s) for name, settings in SIDES.items()}, chosen.repeats)
    about = {"model": shape, "dtype": "bfloat16", "threads": chosen.threads, "requests": requests, "prefix": PREFIX, "own": OWN}
    targets = [
        Target("prefix_ttft_p95", "ttft_p95_ms", "dedupe", "no dedupe", 1.0),
        Target("prefix_tokens", "prompt_tokens_computed", "dedupe", "no dedupe", 1.0),
    ]
    report(about | {"once": once}, runs, targets, chosen.json)
    most = max(run["times_once"] for name in ("dedupe", "chunked, dedupe") for run in runs[name])
    print(f"prefix_computed_once {most:.3f} 1 {'ok' if most <= 1 else 'short'}")


if __name__ == "__main__":
    main()

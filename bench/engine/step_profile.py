"""Shares of the time of engine steps by kind: attention, matrix products, sampling, host.

A closed loop of requests (256 tokens of prompt, 64 of output) keeps `--batch` of them in work, so steps mix prefill and decodes as in
serving. The first steps are left out, and `--steps` steps are measured with torch's profiler. The profiler slows steps down, small ones
most: read the shares, not the times.

On a GPU the shares are kernels by kind, and `idle`: the time in which none ran. High `idle` with much host work means that launches are the
limit. On a CPU they are what the step's thread did: `model` is everything between products and attention, `host` is packing and planning.
The native decoder is one call, all `model`; `--modules` runs the model's own modules and shows its parts.
"""

import tempfile
from array import array
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from bench.common.report import make_parser, write_report
from bench.engine.step_profiler import Profiled, describe
from bench.engine.step_time import save
from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.execution.runner import make_runner
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.model.loader import load_model
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.scheduler import Scheduler

PROMPT, OUTPUT, PAGE = 256, 64, 16


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint (default: a Qwen3 shape of 90M parameters with random weights)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=8, help="requests in work at a time")
    parser.add_argument("--steps", type=int, default=200, help="measured steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--modules", action="store_true", help="run the model's own modules instead of the native decoder (CPU)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with ExitStack() as stack:
        folder = options.model
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            save("90M", folder)
        loaded = load_model(str(folder), dtype=options.dtype, device=device)
    pages = options.batch * -(-(PROMPT + OUTPUT) // PAGE)
    runner = make_runner(loaded, page_size=PAGE, kv_pages=pages, native_decoder=not options.modules)
    profiled = Profiled(runner, options.steps)
    config = SchedulerConfig(runner.loaded.max_model_len, max_num_seqs=options.batch, eos_token_ids=())
    serve(profiled, Scheduler(config, PrefixCache(PagePool(pages, PAGE), PAGE, extend)), options.batch)
    report = profiled.account.report(device)
    print(describe(report))
    write_report(__name__, options, report)


def serve(profiled: Profiled, scheduler: Scheduler, batch: int) -> None:
    """Run steps until the profile is done; submit a request for each one that ends."""
    running = submitted = 0
    while not profiled.is_done:
        for _ in range(batch - running):
            submitted += 1
            prompt = array("I", [(submitted * 37 + place * 11) % 1000 for place in range(PROMPT)])
            sampling = Sampling(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
            refused = scheduler.submit(Submit(str(submitted), prompt.tobytes(), sampling, root=submitted))
            assert refused is None, refused
        plan = scheduler.plan()
        outputs = scheduler.advance(plan, profiled.execute(plan))
        running = batch - sum(1 for each in outputs if each.finish)

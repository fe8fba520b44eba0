"""TTFT of a prompt that is cached nowhere, on the device, or only in the host tier.

The model is Qwen3-shaped with random weights (`bench/engine/step_time.py`). On a CPU the "device" is the same memory, so a host hit
costs two memory copies. On a GPU the host tier is the one that serves: pinned memory and a copy stream. The three cases alternate;
figures are medians.
"""

import tempfile
import time
from array import array
from statistics import median

import torch
from transformers.utils import logging as transformers_logging

from bench.common.report import make_parser, write_report
from bench.engine.step_time import SHAPES, save
from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.execution.host import CudaHostStore, PlainHostStore
from fairlead_worker.execution.runner import make_runner
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.model.loader import load_model
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.scheduler import Scheduler

PAGE = 16


class Engine:
    """An engine with device pages for one prompt and a host tier for four."""

    def __init__(self, folder: str, prompt: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        pages = prompt // PAGE
        self.runner = make_runner(load_model(folder, dtype="bfloat16", device=device), page_size=PAGE, kv_pages=pages)
        store = CudaHostStore if device == "cuda" else PlainHostStore
        self.runner.host = store(self.runner.backend, 4 * pages)
        cache = PrefixCache(PagePool(pages, PAGE), 4 * PAGE, extend, 4 * pages)
        self.scheduler = Scheduler(SchedulerConfig(max_model_len=1 << 20, chunked_prefill_size=prompt + PAGE), cache)
        self.asked = 0

    def first_token(self, prompt: "array[int]") -> tuple[float, int, int]:
        """Return (seconds, cached tokens, cached tokens from the host tier)."""
        self.asked += 1
        before = self.scheduler.load()
        self.scheduler.submit(Submit(str(self.asked), prompt.tobytes(), Sampling(max_tokens=1, temperature=0), 1))
        began = time.perf_counter()
        while plan := self.scheduler.plan():
            self.scheduler.advance(plan, self.runner.execute(plan))
        seconds, after = time.perf_counter() - began, self.scheduler.load()
        assert before.host is not None and after.host is not None
        return seconds, after.cached_tokens - before.cached_tokens, after.host.cached_tokens - before.host.cached_tokens


def tokens(count: int, seed: int) -> "array[int]":
    draw = torch.Generator().manual_seed(seed)
    return array("I", torch.randint(10, 8000, (count,), generator=draw).tolist())


def measure(engine: Engine, length: int, repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {"nowhere": [], "device": [], "host": []}
    for turn in range(repeats + 2):
        kept = tokens(length, 2 * turn)
        for name, prompt in (("nowhere", kept), ("device", kept), ("", tokens(length, 2 * turn + 1)), ("host", kept)):
            seconds, cached, host = engine.first_token(prompt)
            full = (length - 1) // PAGE * PAGE
            assert (cached, host) == {"device": (full, 0), "host": (full, full)}.get(name, (0, 0)), (name, cached, host)
            if name and turn >= 2:
                times[name].append(seconds)
    return {name: median(values) * 1e3 for name, values in times.items()}


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="90M")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        save(options.shape, folder)
        engine = Engine(folder, options.tokens)
        results = measure(engine, options.tokens, options.repeats)
    size = engine.runner.backend.spec.page_bytes * (options.tokens // PAGE) / (1 << 20)
    print(f"Qwen3 shape of {options.shape}, bf16, prompt of {options.tokens} tokens ({size:.0f} MiB of KV): first token when cached")
    for name, milliseconds in results.items():
        print(f"{name:8} {milliseconds:9.1f} ms")
    print(f"host_hit_ratio {results['nowhere'] / results['host']:.2f} of a prompt computed anew")
    write_report(__name__, options, results)

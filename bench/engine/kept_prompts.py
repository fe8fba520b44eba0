"""Cost of keeping the last logits of prompts: bytes of an entry, and CPU time to keep and to repeat a prompt.

On a CPU with one thread and attention backend `reference`. Keeping adds its time to each step that completes a prompt. Repeating replaces
the forward pass of a prompt.
"""

import statistics
import time
from array import array
from typing import Any

import torch

from bench.common.report import make_parser, write_report
from fairlead_worker.execution.kept import KeptLogits
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.scheduler.plan import Row, StepPlan
from fairlead_worker.scheduler.request import Request

PAGE, PAGES, PROMPT, VOCABULARY = 16, 8, 8192, 128_256
MODELS = {"1B": (16, 32, 64), "8B": (32, 32, 128), "70B": (80, 64, 128)}
"""Layers, heads and head size of Llama 3. All have 8 KV heads."""


def measure(kept: KeptLogits, plan: StepPlan, logits: torch.Tensor | None, repeats: int) -> float:
    """Return the median CPU microseconds to complete the logits of `plan`."""
    times = []
    for _ in range(repeats):
        began = time.process_time_ns()
        kept.prepare(plan)(logits)
        times.append((time.process_time_ns() - began) / 1000)
    return statistics.median(times)


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    request = Request("0", array("I", range(PROMPT)), PROMPT, Sampling(max_tokens=1), root=0, arrival=0)
    pages = array("i", [place % PAGES for place in range(PROMPT // PAGE)])
    keep = StepPlan([Row(request, 0, PROMPT, pages, True, slot=0)], samples=1)
    repeat = StepPlan([Row(request, PROMPT, 0, pages, True, slot=0)], samples=1, repeats=1)
    results: list[dict[str, Any]] = []
    print(f"{'model':>6}{'KiB':>8}{'keep':>8}{'repeat':>8}   (µs)")
    for name, (layers, heads, size) in MODELS.items():
        spec = KVSpec((LayerSpec(heads, 8, size, size, 1.0),) * layers, PAGE, torch.bfloat16, torch.device("cpu"))
        kept, logits = KeptLogits(1, ReferenceBackend(spec, PAGES)), torch.zeros(1, VOCABULARY, dtype=torch.bfloat16)
        took = {"keep": measure(kept, keep, logits, options.repeats), "repeat": measure(kept, repeat, None, options.repeats)}
        results.append({"model": name, "bytes": spec.page_bytes + logits.nbytes} | took)
        print(f"{name:>6}{results[-1]['bytes'] // 1024:>8}{took['keep']:>8.0f}{took['repeat']:>8.0f}")
    write_report(__name__, options, results)

"""Time of a model step on CPU (decode of 8 rows, prefill of 256 tokens) with four implementations.

`reference` is the plain model. `cpu` has fused projections and weights packed for oneDNN, all in torch. `layers` uses the native linear
layers and attention, called by the layers in torch. `native` runs a step in one native call, as in serving.

The model is Qwen3-shaped with random weights: 90M parameters (12 layers of 768) or 500M (24 of 1,024, with a vocabulary of 32,768). The
implementations alternate, so that a busy machine slows all of them; ratios are of medians. Figures are CPU time of one thread unless
--threads says otherwise. The bandwidth share is what a decode step must read (packed weights and KV, once), divided by its time and by the
memory bandwidth of this machine.
"""

import tempfile
import time
from array import array
from collections.abc import Callable
from statistics import median
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import fairlead_worker.model.loader as loader
import fairlead_worker.model.packed as packed
from bench.common.report import make_parser, write_report
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.model.decoder import Decoder
from fairlead_worker.native.linear import NativeLinear
from fairlead_worker.scheduler.plan import Row, StepPlan
from fairlead_worker.scheduler.request import Request

SHAPES = {
    "90M": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2304, "vocab_size": 8192},
    "500M": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 32768},
}
ROWS, PROMPT, PAGE = 8, 256, 16
PAGES = 2 * PROMPT // PAGE
TARGETS = {
    ("bfloat16", "decode"): 1.5,
    ("bfloat16", "prefill"): 1.1,
    ("float32", "decode"): 1.8,
    ("float32", "prefill"): 1.8,
}
"""Lower limit of the speed-up of `native` over `plain`."""
BANDWIDTH_TARGETS = {"90M": 0.55, "500M": 0.70}
"""Lower limit of the share of the read bandwidth that a bfloat16 decode reaches."""
READ = 1 << 28
"""Bytes read to measure the bandwidth: far more than any cache."""


def save(shape: str, folder: str) -> None:
    fixed = {"num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 4096}
    config = AutoConfig.for_model("qwen3", **SHAPES[shape], **fixed)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def runners(folder: str, dtype: str) -> dict[str, ModelRunner]:
    """Return the four implementations by name. `layers` and `native` share their weights."""
    with patch.object(Decoder, "stack"), patch.object(loader, "pack_linears"):
        plain = loader.load_model(folder, dtype=dtype)
    with patch.object(packed, "native", return_value=None):
        onednn = loader.load_model(folder, dtype=dtype)
    served = loader.load_model(folder, dtype=dtype)
    pages = ROWS * PAGES
    return {
        "reference": RunnerBuilder(loaded=plain, page_size=PAGE, kv_pages=pages, backend="reference").build(),
        "cpu": RunnerBuilder(loaded=onednn, page_size=PAGE, kv_pages=pages, backend="cpu").build(),
        "layers": RunnerBuilder(loaded=served, page_size=PAGE, kv_pages=pages, backend="native", native_decoder=False).build(),
        "native": RunnerBuilder(loaded=served, page_size=PAGE, kv_pages=pages, backend="native").build(),
    }


def step_bytes(runner: ModelRunner) -> int:
    """Return the bytes that a decode step must read: every packed weight, and the KV of its rows."""
    model, spec = runner.loaded.model, runner.backend.spec
    weights = {id(module): sum(part.nbytes for part in module.memory) for module in model.modules() if isinstance(module, NativeLinear)}
    return sum(weights.values()) + ROWS * (PROMPT + 1) * spec.page_bytes // spec.page_size


def bandwidth(clock: Callable[[], float]) -> float:
    """Return the read bandwidth of a step's threads in bytes per second."""
    memory, best = torch.ones(READ // 4), 0.0
    for _ in range(8):
        began = clock()
        memory.sum()
        best = max(best, READ / (clock() - began))
    return best


def plans(rows: int = ROWS) -> dict[str, StepPlan]:
    requests = [
        Request(
            Submit(str(i), b"", Sampling(max_tokens=64, temperature=0), root=0),
            array("I", [(i * 37 + j * 11) % 8000 for j in range(PROMPT + 1)]),
            PROMPT,
            arrival=i,
        )
        for i in range(rows)
    ]
    tables = [array("i", range(i * PAGES, (i + 1) * PAGES)) for i in range(rows)]
    return {
        "fill": StepPlan([Row(r, 0, PROMPT, t, samples=False) for r, t in zip(requests, tables, strict=True)]),
        "decode": StepPlan([Row(r, PROMPT, 1, t, samples=True) for r, t in zip(requests, tables, strict=True)]),
        "prefill": StepPlan([Row(requests[0], 0, PROMPT, tables[0], samples=True)]),
    }


def measure(sides: dict[str, ModelRunner], plan: StepPlan, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the median seconds of a step for each side. They run in turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 3):
        for name, runner in sides.items():
            began = clock()
            runner.execute(plan)
            if repeat >= 3:
                times[name].append(clock() - began)
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="90M")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        save(options.shape, folder)
        for dtype in options.dtypes:
            sides, steps = runners(folder, dtype), plans()
            for runner in sides.values():
                runner.execute(steps["fill"])
            for kind in ("decode", "prefill"):
                seconds = measure(sides, steps[kind], options.repeats if kind == "decode" else max(3, options.repeats // 3), clock)
                for side, value in seconds.items():
                    results[f"{dtype}_{kind}_{side}_ms"] = value * 1e3
                results[f"{dtype}_{kind}_ratio"] = seconds["reference"] / seconds["native"]
                if (dtype, kind) == ("bfloat16", "decode"):
                    results["bandwidth_gb_s"] = bandwidth(clock) / 1e9
                    results["bandwidth_share"] = step_bytes(sides["native"]) / seconds["native"] / results["bandwidth_gb_s"] / 1e9
    report(results, options.shape, options.threads)
    write_report(__name__, options, results)


def report(results: dict[str, float], shape: str, threads: int) -> None:
    print(f"Qwen3 shape of {shape}, {threads} thread(s), decode: {ROWS} rows after {PROMPT} tokens, prefill: {PROMPT} tokens")
    for (dtype, kind), target in TARGETS.items():
        if f"{dtype}_{kind}_ratio" not in results:
            continue
        for side in ("reference", "cpu", "layers", "native"):
            milliseconds = results[f"{dtype}_{kind}_{side}_ms"]
            rate = (ROWS if kind == "decode" else PROMPT) / milliseconds * 1e3
            print(f"{dtype:9} {kind:8} {side:10} {milliseconds:8.1f} ms {rate:8.0f} tok/s")
        ratio = results[f"{dtype}_{kind}_ratio"]
        print(f"{dtype}_{kind}_ratio {ratio:.2f} {target} {'ok' if ratio >= target else 'short'}")
    if "bandwidth_share" not in results:
        return
    share, target = results["bandwidth_share"], BANDWIDTH_TARGETS[shape]
    print(f"bandwidth_share {share:.2f} of {results['bandwidth_gb_s']:.1f} GB/s {target} {'ok' if share >= target else 'short'}")

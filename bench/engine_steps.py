"""What a step costs the model: decoding 8 rows and prefilling 256 tokens, as served (stacked, packed, `cpu`) and plain (`reference`).

The model is Qwen3-shaped with random weights: 90M parameters (12 layers of 768) or 500M (24 of 1,024, with a vocabulary of 32,768). The two
sides take turns, so that a busy machine slows both; ratios are of medians. CPU time of one thread unless --threads says otherwise.
"""

import argparse
import json
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import fairlead_worker.model.loader as loader
from fairlead_worker.engine.plan import Row, StepPlan
from fairlead_worker.engine.request import Request
from fairlead_worker.execution.runner import ModelRunner, make_runner
from fairlead_worker.messages import Sampling

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
"""How many times faster than plain at least."""


def save(shape: str, folder: str) -> None:
    fixed = {"num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 4096}
    config = AutoConfig.for_model("qwen3", **SHAPES[shape], **fixed)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def runners(folder: str, dtype: str) -> dict[str, ModelRunner]:
    """The model as it was before stacking and packing, on `reference`; and as it is served."""
    with patch.object(loader, "fuse_projections"), patch.object(loader, "pack_linears"):
        plain = loader.load_model(folder, dtype=dtype)
    served = loader.load_model(folder, dtype=dtype)
    pages = ROWS * PAGES
    return {
        "reference": make_runner(plain, page_size=PAGE, kv_pages=pages, backend="reference"),
        "cpu": make_runner(served, page_size=PAGE, kv_pages=pages, backend="cpu"),
    }


def plans() -> dict[str, StepPlan]:
    requests = [
        Request(
            str(i),
            array("I", [(i * 37 + j * 11) % 8000 for j in range(PROMPT + 1)]),
            PROMPT,
            Sampling(max_tokens=64, temperature=0),
            root=0,
            arrival=i,
        )
        for i in range(ROWS)
    ]
    tables = [array("i", range(i * PAGES, (i + 1) * PAGES)) for i in range(ROWS)]
    return {
        "fill": StepPlan([Row(r, 0, PROMPT, t, samples=False) for r, t in zip(requests, tables, strict=True)]),
        "decode": StepPlan([Row(r, PROMPT, 1, t, samples=True) for r, t in zip(requests, tables, strict=True)]),
        "prefill": StepPlan([Row(requests[0], 0, PROMPT, tables[0], samples=True)]),
    }


def measure(sides: dict[str, ModelRunner], plan: StepPlan, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of a step for each side, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 3):
        for name, runner in sides.items():
            began = clock()
            runner.execute(plan)
            if repeat >= 3:
                times[name].append(clock() - began)
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="90M")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        save(options.shape, folder)
        for dtype in ("bfloat16", "float32"):
            sides, steps = runners(folder, dtype), plans()
            for runner in sides.values():
                runner.execute(steps["fill"])
            for kind in ("decode", "prefill"):
                seconds = measure(sides, steps[kind], options.repeats if kind == "decode" else max(3, options.repeats // 3), clock)
                for side, value in seconds.items():
                    results[f"{dtype}_{kind}_{side}_ms"] = value * 1e3
                results[f"{dtype}_{kind}_ratio"] = seconds["reference"] / seconds["cpu"]
    report(results, options.shape, options.threads)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"shape": options.shape, "threads": options.threads} | results, indent=2))


def report(results: dict[str, float], shape: str, threads: int) -> None:
    print(f"Qwen3 shape of {shape}, {threads} thread(s), decode: {ROWS} rows after {PROMPT} tokens, prefill: {PROMPT} tokens")
    for (dtype, kind), target in TARGETS.items():
        for side in ("reference", "cpu"):
            milliseconds = results[f"{dtype}_{kind}_{side}_ms"]
            rate = (ROWS if kind == "decode" else PROMPT) / milliseconds * 1e3
            print(f"{dtype:9} {kind:8} {side:10} {milliseconds:8.1f} ms {rate:8.0f} tok/s")
        ratio = results[f"{dtype}_{kind}_ratio"]
        print(f"{dtype}_{kind}_ratio {ratio:.2f} {target} {'ok' if ratio >= target else 'short'}")


if __name__ == "__main__":
    main()

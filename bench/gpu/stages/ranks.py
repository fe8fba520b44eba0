"""Stage: a model over two GPUs, if there are two: with CUDA graphs and overlap, and without, the same text, and 64 streams at once.

The roofline is of both GPUs together; sums between them are not counted.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import torch

from bench.gpu.device import Device
from bench.gpu.model import saved
from bench.gpu.roofline import rates_of
from bench.gpu.shared_model import Kit
from bench.gpu.stages.serving import ask, worker

RANKS = 2
WAYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("default flags", ()),
    ("no graphs, no overlap", ("--overlap", "off", "--max-cudagraph-capture-size", "0")),
)
SAME_TOKENS = 16
"""Tokens of the greedy answer that must be equal."""


def lacking(device: Device) -> str:
    """Return why the stage cannot run; empty if it can."""
    found = torch.cuda.device_count() if device.cuda else 0
    return "" if found >= RANKS else f"skipped: it needs {RANKS} GPUs, and there {'is one' if found == 1 else 'are none'}"


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """For each set of flags: the start, whether its trial passed, and 64 streams. Then whether the greedy answers are equal."""
    if reason := lacking(device):
        yield {"what": f"{RANKS} ranks", "said": reason}
        return
    one = rates_of(device)
    rates = replace(one, bytes_per_s=RANKS * one.bytes_per_s, flops_per_s=RANKS * one.flops_per_s)
    kit.drop()
    shape, answers = "8b", dict[str, str]()
    with saved(device, shape) as model:
        for what, flags in WAYS:
            try:
                with worker(device, model, "--tensor-parallel-size", str(RANKS), *flags, gpus=RANKS) as served:
                    fallback = httpx.get(f"{served.url}/ready", timeout=10).json().get("fallback", "")
                    yield {"what": f"{RANKS} ranks, start, {what}", "ok": not fallback, "said": fallback, "seconds": served.seconds}
                    body = {"model": model.name, "prompt": list(range(300, 364)), "max_tokens": SAME_TOKENS, "temperature": 0}
                    answer = httpx.post(f"{served.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=60).raise_for_status()
                    answers[what] = answer.json()["choices"][0]["text"]
                    row = ask(served.url, model.name, shape, rates, 64, 1024, 128)
                    yield row | {"what": f"{RANKS} ranks, {row['what']}", "with": what}
            except Exception as error:  # whatever it dies of: the other flags may tell something yet
                yield {"what": f"{RANKS} ranks, {what}", "ok": False, "said": str(error)[-600:]}
    first, second = (answers.get(what) for what, _ in WAYS)
    yield {"what": f"{RANKS} ranks: the same text with graphs and without", "ok": first is not None and first == second}

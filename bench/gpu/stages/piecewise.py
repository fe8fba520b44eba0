"""Stage: chunks and mixed steps as piecewise CUDA graphs, beside the same steps without, in turns."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.batches import packed
from bench.gpu.device import Device, median
from bench.gpu.model import weight_bytes
from bench.gpu.roofline import beside_roofline, decode_work, prefill_work, rates_of
from bench.gpu.shared_model import PAGE, Kit
from fairlead_worker.execution.cuda_graphs.piecewise import SIZES, PieceSizes, record_pieces
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.kernels.base import PackedStep

TURNS = 3
TOLERANCE = 0.1
"""Norm of the difference of logits over their norm: padding sums in another order, and rounding adds up over 32 layers."""


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """The sizes that a worker would record here; seconds and memory of all sizes; then chunks, alone and beside decodes."""
    counts, decodes, context = ((48, 64, 128, 256, 512, 1024, 2048), 32, 2048) if not device.tiny else ((20, 64), 2, 24)
    shape, rates, most = "tiny" if device.tiny else "8b", rates_of(device), counts[-1]
    runner = kit.shared(decodes * -(-context // PAGE) + -(-most // PAGE), decodes)
    try:
        chosen = record(device, runner, PieceSizes(most))
        yield chosen | {"what": "sizes whose launches take longer than the device"}
        yield record(device, runner, PieceSizes(most, [size for size in SIZES if size <= most])) | {"what": "all sizes"}
        for tokens in counts:
            for beside in (0, decodes):
                chunk = tokens - beside
                step = mixed_step(device, beside, context, chunk)
                row, seconds = compare(device, runner, step)
                row["what"] = f"a chunk of {chunk}" + (f" beside {beside} decodes" if beside else "")
                row["recorded_by_default"] = tokens <= chosen["largest"]
                works = prefill_work(shape, chunk), decode_work(shape, beside, context)
                moved, flops = map(sum, zip(*works, strict=True))
                yield beside_roofline(row, rates, (moved - sum(weight_bytes(shape)), flops), seconds)  # both count the weights
    finally:
        runner.pieces = None


def record(device: Device, runner: ModelRunner, sizes: PieceSizes) -> dict[str, Any]:
    """Record `sizes`; return how many, their seconds, and the memory that they hold."""
    runner.pieces, before, began = None, free(device), time.perf_counter()
    runner.pieces = record_pieces(runner.graphs, runner.forward, runner.backend, runner.loaded.max_model_len, sizes)
    seconds, held, chosen = time.perf_counter() - began, before - free(device), sizes.chosen or ()
    row = {"ok": not sizes.failure, "sizes": len(chosen), "largest": max(chosen, default=0), "seconds": seconds, "mib": held / 2**20}
    return row | ({"said": sizes.failure} if sizes.failure else {})


def free(device: Device) -> int:
    device.wait()
    return torch.cuda.mem_get_info(device.device)[0] if device.cuda else 0


def mixed_step(device: Device, decodes: int, context: int, chunk: int) -> PackedStep:
    """Return `decodes` rows at the end of `context` tokens beside a chunk at its beginning, each on its own pages; all sample."""
    each = -(-context // PAGE)
    tables = [list(range(row * each, (row + 1) * each)) for row in range(decodes)]
    tables.append(list(range(decodes * each, decodes * each + -(-chunk // PAGE))))
    step = packed([(context - 1, 1)] * decodes + [(0, chunk)], tables, PAGE, device.device)
    tokens = 10 + torch.arange(decodes + chunk, device=device.device) * 7 % 480
    return replace(step, tokens=tokens, sampling=torch.tensor([*range(decodes), decodes + chunk - 1], device=device.device))


@torch.inference_mode()
def compare(device: Device, runner: ModelRunner, step: PackedStep) -> tuple[dict[str, Any], float]:
    """Return a row of the step without and with the runner's pieces, and the seconds with them."""
    ways = (None, runner.pieces)
    times: tuple[list[float], list[float]] = [], []
    logits = []
    for turn in range(TURNS if not device.tiny else 1):
        for pieces, seconds in zip(ways, times, strict=True):
            runner.pieces = pieces
            if not turn:
                logits.append(runner.run(step).float().clone())
            seconds.append(device.seconds(lambda: runner.run(step), 5))
    plain, replayed = map(median, times)
    difference = float((logits[1] - logits[0]).norm() / logits[0].norm())
    return {
        "ok": difference < TOLERANCE,
        "difference": difference,
        "plain_ms": plain * 1e3,
        "ms": replayed * 1e3,
        "times": plain / replayed,
    }, replayed

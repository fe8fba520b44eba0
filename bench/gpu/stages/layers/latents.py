"""Stage: FlashInfer's MLA kernels on latents of 512 + 64, beside `reference` and what the device allows."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.batches import packed, steps, worst_error
from bench.gpu.device import Device
from bench.gpu.report import beside
from bench.gpu.roofline import beside_roofline, rates_of
from bench.gpu.stages.attention import ALLOWED
from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.reference import ReferenceBackend

LEAST = 0.4
"""Share of the roofline that decodes should reach. It bounds what a first run has to show; no figure of these kernels is known here."""


def measure(device: Device) -> Iterator[dict[str, Any]]:
    """16 heads (V2 Lite, V3 on 8 ranks) and 128 (V3 on one): numbers, then decodes and a chunk by fa2, and by fa3 on Hopper."""
    context, batch, layers = (4096, 64, 4) if not device.tiny else (20, 2, 1)
    rates, each = rates_of(device), -(-context // 16)
    hopper = device.cuda and torch.cuda.get_device_capability(device.device)[0] == 9
    for heads in (16, 128) if not device.tiny else (16,):
        kind = LayerSpec(heads, 1, 576, 512, 192**-0.5, value_in_key=True)
        for kernels in ("fa2", "fa3") if hopper else ("fa2",):
            name, pages = f"{heads} heads, {kernels}", 400 if device.tiny else 16_000
            spec = KVSpec((kind,), 16, torch.bfloat16, device.device)
            tested, oracle = device.flashinfer(spec, pages, kernels), ReferenceBackend(replace(spec, dtype=torch.float32), pages)
            rounds = steps(spec, pages, random.Random(1), 3 if device.tiny else 9, context // 6, 3 if device.tiny else 12)
            error, tokens = worst_error(tested, oracle, rounds, torch.Generator().manual_seed(1))
            row: dict[str, Any] = {"what": f"latents, {name}, beside reference", "tokens": tokens, "error": error}
            yield row | {"ok": error <= ALLOWED[torch.bfloat16]}
            del tested, oracle
            chunk = context // 4
            for what, rows in (("decodes", [(context - 1, 1)] * batch), ("a chunk", [(context - chunk, chunk)])):
                seconds = _layer_seconds(device, kind, kernels, rows, each, layers)
                pairs = sum(count * start + count * (count + 1) / 2 for start, count in rows)
                work = (len(rows) * context * 576 * 2.0, 2.0 * pairs * heads * (576 + 512))
                row = beside_roofline({"what": f"{what}, {name}", "layer_us": seconds * 1e6}, rates, work, seconds)
                yield beside(row, "of_roofline", least=LEAST) if what == "decodes" else row


def _layer_seconds(device: Device, kind: LayerSpec, kernels: str, rows: list[tuple[int, int]], each: int, layers: int) -> float:
    """Seconds of a layer, storing latents included."""
    spec = KVSpec((kind,) * layers, 16, torch.bfloat16, device.device)
    backend = device.flashinfer(spec, len(rows) * each, kernels)
    tables = [list(range(row * each, row * each + each)) for row in range(len(rows))]
    context, total = backend.plan(packed(rows, tables, 16, device.device)), sum(count for _, count in rows)
    shapes = ((kind.heads, 576), (1, 576), (1, 512))
    parts = [torch.randn(total, *shape, dtype=torch.bfloat16, device=device.device) for shape in shapes]
    return device.kernel_seconds([lambda: [context.attend(number, *parts) for number in range(layers)]]) / layers

"""Stage: how long steps of an 8B-shaped model take, beside what the device's memory and arithmetic would allow."""

from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu.batches import packed
from bench.gpu.device import Device
from bench.gpu.roofline import Rates
from bench.gpu.roofline import measure as measure_rates
from fairlead_worker.kernels.base import KVSpec, LayerSpec, PackedStep
from fairlead_worker.kernels.reference import ReferenceBackend

CONTEXT = 2048


def measure(device: Device, kinds: set[str]) -> Iterator[dict[str, Any]]:
    """The device's own copy and product rates first; then attention alone: decodes of several batches, prefill chunks, fa2 beside fa3."""
    rates = measure_rates(device)
    yield {"what": "this device", "gb_per_s": rates.bytes_per_s / 1e9, "tflops": rates.flops_per_s / 1e12}
    head = (32, 8) if not device.tiny else (4, 2)
    kind = LayerSpec(*head, 128, 128, 128**-0.5)
    layers = (kind,) * (8 if not device.tiny else 2)
    batches, context = ((1, 16, 64, 256), CONTEXT) if not device.tiny else ((1, 2), 40)
    for batch in batches:
        rows = [(context - 1, 1)] * batch
        yield attention(device, f"decode, batch {batch}", layers, rows, rates)
    chunk = 2048 if not device.tiny else 24
    yield attention(device, f"prefill chunk of {chunk} at its beginning", layers, [(0, chunk)], rates)
    yield attention(device, f"prefill chunk of {chunk} behind {2 * chunk}", layers, [(2 * chunk, chunk)], rates)
    yield attention(device, "decodes beside a chunk", layers, [(context - 1, 1)] * batches[-1] + [(0, chunk // 4)], rates)
    drafts = 4
    for batch in batches[:3]:
        rows = [(context - 1 - drafts, 1)] * batch
        yield attention(device, f"verification of {drafts} drafted tokens, batch {batch}", layers, rows, rates, drafts=drafts)
    if "bf16-128-float8" in kinds or device.tiny:
        for batch in batches:
            rows = [(context - 1, 1)] * batch
            yield attention(device, f"decode, batch {batch}, float8 KV", layers, rows, rates, scales=(1.0,) * len(layers))
    if "bf16-128-fa3" in kinds:
        yield attention(device, f"prefill chunk of {chunk} at its beginning, fa3", layers, [(0, chunk)], rates, "fa3")


def attention(
    device: Device,
    what: str,
    layers: tuple[LayerSpec, ...],
    rows: list[tuple[int, int]],
    rates: Rates,
    kernels: str = "fa2",
    scales: tuple[float, ...] | None = None,
    drafts: int = 0,
) -> dict[str, Any]:
    """A row: microseconds to plan and for one layer, storing KV included, and the share of what the device would allow.

    drafts: each row is a decode with so many drafted tokens behind it, whose KV a device has to read once.
    """
    spec = KVSpec(layers, 16, torch.bfloat16, device.device, scales)
    read = sum(start + count + drafts for start, count in rows) * layers[0].kv_heads * 2 * 128 * spec.kv_dtype.itemsize
    table, tables = 0, []
    for start, count in rows:
        tables += [list(range(table, table := table + -(-(start + count + drafts) // 16)))] * (1 + drafts)
    rows = [(start + place, count) for start, count in rows for place in range(1 + drafts)]
    backend = device.flashinfer(spec, table, kernels)
    step = packed(rows, tables, 16, device.device)
    kind, total = layers[0], sum(count for _, count in rows)
    parts = [
        torch.randn(total, heads, 128, dtype=torch.bfloat16, device=device.device) for heads in (kind.heads, kind.kv_heads, kind.kv_heads)
    ]

    def through(context: Any) -> None:
        for number in range(len(layers)):
            context.attend(number, *parts)

    plan = device.seconds(lambda: backend.plan(step))
    context = backend.plan(step)
    each = device.kernel_seconds([lambda: through(context)]) / len(layers)
    pairs = sum(count * start + count * (count + 1) / 2 for start, count in rows)
    ideal = rates.seconds(read, 4 * pairs * 128 * kind.heads)
    row = {"what": what, "plan_us": plan * 1e6, "layer_us": each * 1e6, "ideal_us": ideal * 1e6, "of_ideal": ideal / each}
    if not device.tiny and len(rows) > 1 and kernels == "fa2" and scales is None:
        row["reference_layer_us"] = _reference(device, spec, table, step, parts) * 1e6
    return row


def _reference(device: Device, spec: KVSpec, pages: int, step: PackedStep, parts: list[torch.Tensor]) -> float:
    """Seconds of a layer of the reference backend, its plan included once in all layers."""
    backend = ReferenceBackend(KVSpec(spec.layers[:2], 16, spec.dtype, spec.device), pages)
    context = backend.plan(step)
    context.attend(0, *parts)
    return device.seconds(lambda: context.attend(1, *parts), 5)

"""Stage: layers in groups, each with page tables of its own, beside the same layers in one group."""

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
from fairlead_worker.kernels.groups import group_layers, spread
from fairlead_worker.kernels.reference import ReferenceBackend

MOST_PLAN_MS = 3.0
"""A step of a 12B shape takes three times as long at 64 streams, so planning stays hidden behind it (`docs/design/gpu/overlap.md`)."""


def measure(device: Device) -> Iterator[dict[str, Any]]:
    """First that all groups attend as `reference` does; then decodes: the time of planning, and of a layer."""
    context, window, batch, repeats = (4096, 1024, 64, 4) if not device.tiny else (40, 16, 2, 1)
    full = LayerSpec(*((16, 8) if not device.tiny else (4, 2)), 128, 128, 128**-0.5)
    windowed = replace(full, window=window)
    layers = ([windowed] * 5 + [full]) * repeats
    one = KVSpec(tuple(layers), 16, torch.bfloat16, device.device)
    grouped = replace(one, groups=group_layers(layers, context + 1)[0])
    pages = 400 if device.tiny else 4000
    rounds = steps(one, pages, random.Random(1), 3 if device.tiny else 9, context // 2, 3)
    tested = device.flashinfer(grouped, pages * grouped.num_groups)
    oracle = ReferenceBackend(replace(grouped, dtype=torch.float32), pages * grouped.num_groups)
    error, tokens = worst_error(tested, oracle, (spread(step, grouped) for step in rounds), torch.Generator().manual_seed(1))
    yield {"what": "groups beside reference", "tokens": tokens, "error": error, "ok": error <= ALLOWED[torch.bfloat16]}
    del tested, oracle
    rates, each = rates_of(device), -(-context // 16)
    step = packed([(context - 1, 1)] * batch, [list(range(row * each, row * each + each)) for row in range(batch)], 16, device.device)
    parts = [
        torch.randn(batch, heads, 128, dtype=torch.bfloat16, device=device.device) for heads in (full.heads, full.kv_heads, full.kv_heads)
    ]
    read = batch * sum(min(context, kind.window or context) for kind in layers)
    work = (read * full.kv_heads * 2 * 128 * 2.0, 4.0 * read * full.heads * 128)
    for what, spec in (("one group", one), (f"{grouped.num_groups} groups", grouped)):
        backend, planned = device.flashinfer(spec, batch * each * spec.num_groups), spread(step, spec)
        plan = device.seconds(lambda backend=backend, planned=planned: backend.plan(planned))  # type: ignore[misc]  # defaults
        planned_step = backend.plan(planned)

        def through(planned_step: Any = planned_step) -> None:
            for number in range(len(layers)):
                planned_step.attend(number, *parts)

        row: dict[str, Any] = {
            "what": f"decodes, {batch} at {context}, {what}",
            "layer_us": device.kernel_seconds([through]) / len(layers) * 1e6,
        }
        row |= {"plan_ms": plan * 1e3}
        yield beside(beside_roofline(row, rates, work, row["layer_us"] * len(layers) / 1e6), "plan_ms", most=MOST_PLAN_MS)

"""Stage: FlashInfer against `reference` on random paged batches."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.batches import packed, steps, worst_error
from bench.gpu.compile import KINDS, kernels, layer, scales
from bench.gpu.device import Device
from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.reference import ReferenceBackend

ALLOWED = {torch.bfloat16: 0.015, torch.float16: 0.003}
"""Largest |difference| / (1 + |reference in float32|) of an output, from the same 16-bit inputs."""


def check(device: Device, kinds: set[str]) -> Iterator[dict[str, Any]]:
    """Every compiled kind with pages of 1, 16 and 64 tokens; then what FlashInfer does not do, and a model of two kinds by turns."""
    for kind in KINDS:
        if kind not in kinds or (device.tiny and kind not in ("bf16-64", "bf16-256-window-cap", "bf16-128-float8")):
            continue
        dtype = getattr(torch, KINDS[kind][0])
        for page_size in (16, 1, 64) if not device.tiny else (16,):
            yield compare(device, kind, (layer(kind),), page_size, dtype, kernels(kind), scales(kind))
    if "bf16-128" not in kinds:
        return
    left_out = LayerSpec(4, 2, 80, 80, 80**-0.5)
    turns = [layer(kind) for kind in ("bf16-128", "bf16-128-window") if kind in kinds]
    yield compare(device, "kinds by turns, one not FlashInfer's", (*turns, left_out), 16, torch.bfloat16)
    yield repeated(device, layer("bf16-128"))


def compare(
    device: Device,
    what: str,
    layers: tuple[LayerSpec, ...],
    page_size: int,
    dtype: torch.dtype,
    prefill: str = "fa2",
    scales: tuple[float, ...] | None = None,
) -> dict[str, Any]:
    """A row: the worst error over several random runs. With `scales` both hold the same KV in float8."""
    spec = KVSpec(layers, page_size, dtype, device.device, scales)
    runs, longest, requests, pages = (1, 20, 3, 400) if device.tiny else (2, 700, 12, 16_000)
    worst, tokens = 0.0, 0
    for seed in range(runs):
        tested, oracle = device.flashinfer(spec, pages, prefill), ReferenceBackend(replace(spec, dtype=torch.float32), pages)
        rounds = steps(spec, pages, random.Random(seed), 4 if device.tiny else 9, longest, requests)
        error, count = worst_error(tested, oracle, rounds, torch.Generator().manual_seed(seed))
        worst, tokens = max(worst, error), tokens + count
    row = {"what": what, "page_size": page_size, "dtype": str(dtype), "tokens": tokens, "error": worst, "allowed": ALLOWED[dtype]}
    return row | {"ok": worst <= ALLOWED[dtype]}


def repeated(device: Device, kind: LayerSpec) -> dict[str, Any]:
    """Whether a decode's bits are the same run after run, and in company: told, not demanded (keys are split by what else is there)."""
    spec = KVSpec((kind,), 16, torch.bfloat16, device.device)
    backend = device.flashinfer(spec, 4000)
    length, company = (20, 2) if device.tiny else (900, 40)
    generator = torch.Generator().manual_seed(1)
    tables = [list(range(row * 60, row * 60 + 60)) for row in range(company)]
    for part in (*backend.keys, *backend.values):
        part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float32).to(part.dtype))
    shapes = (kind.heads, kind.kv_heads, kind.kv_heads)
    parts = [torch.randn(company, heads, kind.key_dim, generator=generator).to(device.device, spec.dtype) for heads in shapes]

    def first(rows: int) -> torch.Tensor:
        step = packed([(length, 1)] * rows, tables[:rows], 16, device.device)
        return backend.plan(step).attend(0, *(part[:rows] for part in parts))[0].clone()

    alone = first(1)
    row = {"what": "a decode's bits", "same_again": torch.equal(alone, first(1)), "same_in_company": torch.equal(alone, first(company))}
    return row | {"ok": row["same_again"]}

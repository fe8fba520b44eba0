"""Stage: linear layers of AWQ and GPTQ in 4 bits: torch's layout, the ways to multiply, and their times beside the roofline."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from bench.gpu.device import Device
from bench.gpu.report import beside
from bench.gpu.roofline import Rates, beside_roofline, rates_of
from fairlead_worker.model.lowbit.int4 import FEW, MANY, Int4Linear, int4_linear, int4_problem, pack, tiles_of

LAYERS = {"qkv": (6144, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
"""Outputs and inputs of Llama 3.1 8B's layers."""
TINY = {"gate_up": (64, 256)}
COUNTS = (1, 8, 16, 32, 64, 128, 256, 2048)
GROUP = 128
CACHED = 256 << 20
"""More than a device's cache holds, in bytes."""
ALLOWED = 0.012
"""Of a row's norm: scales, zeros, numbers and outputs are rounded to bfloat16 (2**-8 at most, zeros of 7 steps at most)."""


def measure(device: Device) -> Iterator[dict[str, Any]]:
    """Rows: the kernel and its layout; products beside the checkpoint's own numbers in float64; times of all ways by rows."""
    problem = int4_problem(device.device)
    yield {"what": "torch's int4 kernel", "ok": not problem} if device.cuda else {"what": "torch's int4 kernel", "left_out": problem}
    if device.cuda:
        yield layout(device)
    counts = COUNTS if device.cuda and not problem else (MANY + 8,)
    for group, ordered in ((GROUP, False), (32, False), (GROUP, True)):
        yield products(device, group, ordered, counts)
    rates = rates_of(device)
    for name, sizes in (TINY if device.tiny else LAYERS).items():
        yield from times(device, name, sizes, counts, rates)


def drawn(device: Device, outputs: int, inputs: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales of float16, and zero points."""
    generator = torch.Generator().manual_seed(outputs + group)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8)
    scale = ((0.5 + torch.rand(outputs, inputs // group, generator=generator)) / 100).half().float()
    zero = torch.randint(0, 16, scale.shape, generator=generator)
    return codes.to(device.device), scale.to(device.device), zero.to(device.device)


def layout(device: Device) -> dict[str, Any]:
    """A row: whether torch packs as `pack` does."""
    equal = []
    for inputs in (1024, 192, 96):
        codes, _, _ = drawn(device, 64, inputs, 32)
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()
        equal.append(torch.equal(torch.ops.aten._convert_weight_to_int4pack(pairs, tiles_of(inputs)), pack(codes)))
    return {"what": "torch packs the same words", "ok": all(equal)}


@torch.inference_mode()
def products(device: Device, group: int, ordered: bool, counts: tuple[int, ...]) -> dict[str, Any]:
    """A row: the largest difference of a product from (code - zero point) * scale in float64, over its norm."""
    outputs, inputs = (64, 256) if device.tiny else (1024, 4096)
    codes, scale, zero = drawn(device, outputs, inputs, group)
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1)).to(device.device) if ordered else None
    layer = int4_linear(codes, scale, zero, None, order)
    exact = (codes.double() - zero.repeat_interleave(group, 1)) * scale.double().repeat_interleave(group, 1)
    exact = exact if order is None else exact[:, order.argsort()]
    worst = 0.0
    for count in counts:
        rows = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(torch.bfloat16).to(device.device)
        want = rows.double() @ exact.T
        worst = max(worst, ((layer(rows).double() - want).norm() / want.norm()).item())
    name = f"products, groups of {group}{', act-order' if ordered else ''}"
    return {"what": name, "ok": worst <= ALLOWED, "differs": worst, "allowed": ALLOWED}


@torch.inference_mode()
def times(device: Device, name: str, sizes: tuple[int, int], counts: tuple[int, ...], rates: Rates) -> Iterator[dict[str, Any]]:
    """Rows: for each number of rows all ways, bfloat16, and the way in use beside the roofline; then which is the fastest."""
    outputs, inputs = sizes
    layer = int4_linear(*drawn(device, outputs, inputs, GROUP), None)
    layers = [layer, *(deepcopy(layer) for _ in range(copies(device, layer.weight.nbytes) - 1))]
    wide = [layer.numbers().to(torch.bfloat16).clone() for _ in range(copies(device, 4 * layer.weight.nbytes))]
    fastest: dict[int, str] = {}
    for count in counts:
        rows = torch.randn(count, inputs, dtype=torch.float32, device=device.device).to(torch.bfloat16)
        ways: dict[str, Callable[[Int4Linear], Any]] = {"widened": lambda each: widened(each, rows)}  # noqa: B023  # run at once
        if device.cuda and count <= 2 * MANY:
            ways["torch"] = lambda each: each.multiply(rows)  # noqa: B023
            if layer.kernels.multiply is not None:
                ways["triton"] = lambda each: each.kernels.multiply(rows, each.weight, each.pairs)  # type: ignore[misc]  # noqa: B023
        found = {way: 1e3 * device.kernel_seconds([partial(run, each) for each in layers], 10) for way, run in ways.items()}
        fastest[count] = min(found, key=found.__getitem__)
        plain = device.kernel_seconds([partial(functional.linear, rows, each) for each in wide], 10)
        used = device.kernel_seconds([partial(each, rows) for each in layers], 10)
        work = (layer.weight.nbytes + layer.pairs.nbytes + 2 * count * (inputs + outputs), 2 * count * inputs * outputs)
        row = {"what": f"{name} in 4 bits, {count} rows", "used_ms": 1e3 * used, "bfloat16_ms": 1e3 * plain, "of_bfloat16": used / plain}
        row = beside_roofline(row | {f"{way}_ms": each for way, each in found.items()}, rates, work, used)
        yield beside(row, "of_bfloat16", most=1.0)
    yield {"what": f"{name}, the fastest way by rows", "fastest": fastest, "in_use": f"torch to {FEW}, triton to {MANY}, then widened"}


def copies(device: Device, weight: int) -> int:
    """Return how many layers of `weight` bytes a device's cache does not hold."""
    return -(-CACHED // weight) if device.cuda else 1


def widened(layer: Int4Linear, rows: torch.Tensor) -> torch.Tensor:
    return functional.linear(rows, layer.widened())

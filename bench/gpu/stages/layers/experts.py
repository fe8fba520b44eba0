"""Stage: experts in 8 and 4 bits beside bfloat16, in the shape of Qwen3 30B-A3B: what they compute, and their time beside the roofline."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu import interpreter
from bench.gpu.device import Device
from bench.gpu.models.low_bit_weights import narrow_experts
from bench.gpu.report import beside
from bench.gpu.roofline import beside_roofline, rates_of
from fairlead_worker.kernels.flashinfer_library import library
from fairlead_worker.model.fused.experts import GroupedExperts
from fairlead_worker.model.lowbit.choose import choose_rounder, find_problem, load_triton_product
from fairlead_worker.model.lowbit.experts import ExpertWeights, LowBitExperts, PlainProduct, Product, Scales
from fairlead_worker.model.lowbit.linear import CAPABILITY
from fairlead_worker.model.lowbit.rows import Rounder, TorchRounder

SUMS = 0.03
"""Of the norm: another order of sums in bfloat16, two products, and sums of 14 bits."""
ROUNDED = 0.05
"""The same if inner values are rounded to float8 too: those that differ in the last bit go to another neighbour."""
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@torch.inference_mode()
def measure(device: Device) -> Iterator[dict[str, Any]]:
    """Each form and way: a trial of the kernel, its numbers beside explicit ones, and its time at several numbers of tokens."""
    count, inner, width, choices = (128, 768, 2048, 8) if device.cuda else (3, 128, 128, 2)
    sizes = (1, 16, 64, 256, 2048) if device.cuda else (1, 8)
    torch.backends.cuda.matmul.allow_tf32 = False  # what is explicit is in float32
    rates = rates_of(device)
    up, down = _draw(device, count, 2 * inner, width, 1), _draw(device, count, width, inner, 2)
    kernels: Any = (library() if device.cuda else interpreter) or interpreter
    ways: dict[str, tuple[Forward, float, float]] = {
        "bfloat16": (GroupedExperts(up, down, kernels.silu_and_mul, torch.arange(count, device=device.device)), 2.0, 1.0)
    }
    multiplies = device.cuda and torch.cuda.get_device_capability(device.device) >= CAPABILITY
    for scales in Scales:
        parts = narrow_experts(up, scales), narrow_experts(down, scales)
        each = sum(map(_bytes, parts)) / (up.numel() + down.numel())
        for rounds in (True, False) if (multiplies or not device.cuda) and scales is not Scales.GROUPS else (False,):
            name = f"{'MXFP4' if scales is Scales.GROUPS else 'float8'} by {scales.value}, inputs {'rounded' if rounds else 'in bfloat16'}"
            problem = find_problem(device.device, scales, rounds, count) if device.cuda else ""
            yield {"what": f"{name}: trial", "ok": not problem} | ({"said": problem} if problem else {})
            if problem:
                continue
            product: Product = load_triton_product() if device.cuda else PlainProduct()
            rows: Rounder | None = None
            if rounds:
                rows = (choose_rounder if device.cuda else _plain_rounder)(device.device, scales is Scales.BLOCKS)
            experts = LowBitExperts(*parts, "silu_and_mul", product, rows)
            plain = LowBitExperts(*parts, "silu_and_mul", PlainProduct(), rows)
            for tokens in (sizes[0], sizes[-1]):
                given = _step(device, tokens, count, choices, width)
                got, want = experts(*given).float(), plain(*given).float()
                differs = ((got - want).norm() / want.norm()).item()
                yield {"what": f"{name}: {tokens} tokens", "ok": differs <= (ROUNDED if rounds else SUMS), "differs": differs}
            ways[name] = (experts, each, 2.0 if rounds else 1.0)
    for tokens in sizes:
        given = _step(device, tokens, count, choices, width)
        before = 0.0
        for name, (forward, each, faster) in ways.items():
            taken = device.kernel_seconds([lambda forward=forward, given=given: forward(*given)])  # type: ignore[misc]
            before = before or taken
            work = _work(given, 3 * inner * width, each, faster)
            row = {"what": f"{tokens} tokens, {name}", "ms": taken * 1e3, "of_bfloat16": taken / before}
            row = beside_roofline(row, rates, work, taken)
            yield beside(row, "of_bfloat16", most=1.0) if "MXFP4" in name else row


def _plain_rounder(device: torch.device, blocks: bool) -> Rounder:
    return TorchRounder(blocks)


def _draw(device: Device, experts: int, outputs: int, inputs: int, seed: int) -> torch.Tensor:
    drawn = torch.Generator(device.device).manual_seed(seed)
    weight = torch.randn(experts, outputs, inputs, generator=drawn, device=device.device)
    return weight.mul_(inputs**-0.5).to(torch.bfloat16)


def _step(device: Device, tokens: int, experts: int, choices: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens [tokens, width], their experts and the weights of these."""
    drawn = torch.Generator(device.device).manual_seed(tokens)
    inputs = torch.randn(tokens, width, generator=drawn, device=device.device).to(torch.bfloat16)
    index = torch.rand(tokens, experts, generator=drawn, device=device.device).topk(choices).indices
    return inputs, index, torch.full(index.shape, 1 / choices, dtype=torch.bfloat16, device=device.device)


def _bytes(weights: ExpertWeights) -> int:
    return weights.values.nbytes + weights.scale.nbytes


def _work(given: tuple[torch.Tensor, ...], numbers: int, each: float, faster: float) -> tuple[float, float]:
    """Return the bytes of a step, and its FLOPs over how much faster they are than bfloat16's. numbers: of an expert, in `each` bytes."""
    inputs, index = given[:2]
    return len(set(index.flatten().tolist())) * numbers * each + 2 * inputs.nbytes, 2 * index.numel() * numbers / faster

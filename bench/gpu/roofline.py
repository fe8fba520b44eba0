"""What a device allows: memory bandwidth and FLOP/s, by its data sheet or, for other devices, as torch's copy and product reach them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.device import Device
from bench.gpu.model import SHAPES, head_dim, kv_heads, weight_bytes


@dataclass(frozen=True)
class Rates:
    """Rates of a device, in bfloat16."""

    bytes_per_s: float
    flops_per_s: float
    source: str

    def seconds(self, moved: float, flops: float) -> float:
        """Return the shortest time in which a device moves so many bytes and does so many FLOPs."""
        return max(moved / self.bytes_per_s, flops / self.flops_per_s)

    def share(self, work: tuple[float, float], seconds: float) -> float:
        """Return the shortest time of `work` (bytes and FLOPs) as a share of `seconds`."""
        return self.seconds(*work) / seconds


SHEETS = {
    "H200": Rates(4.8e12, 989e12, "data sheet, H200 SXM"),
    "H100 PCIe": Rates(2.0e12, 756e12, "data sheet, H100 PCIe"),
    "H100 NVL": Rates(3.9e12, 835e12, "data sheet, H100 NVL"),
    "H100": Rates(3.35e12, 989e12, "data sheet, H100 SXM"),
    "A100-SXM4-40GB": Rates(1.555e12, 312e12, "data sheet, A100 40GB"),
    "A100-PCIE-40GB": Rates(1.555e12, 312e12, "data sheet, A100 40GB"),
    "A100 80GB PCIe": Rates(1.935e12, 312e12, "data sheet, A100 80GB PCIe"),
    "A100": Rates(2.039e12, 312e12, "data sheet, A100 80GB SXM"),
}
"""Dense rates by NVIDIA's data sheets: part of the device's name -> rates. The first match counts."""


def rates_of(device: Device) -> Rates:
    """Return the rates of `device`."""
    name = torch.cuda.get_device_properties(device.device).name if device.cuda else "cpu"
    return find_sheet(name) or measure(device)


def find_sheet(name: str) -> Rates | None:
    """Return the rates of the data sheet of the device called `name`; None: it is not in the table."""
    return next((rates for part, rates in SHEETS.items() if part.lower() in name.lower()), None)


def measure(device: Device) -> Rates:
    """Return what a large copy and a large product reach."""
    size = 1 << (29 if device.cuda else 20)
    source = torch.empty(size, dtype=torch.bfloat16, device=device.device).normal_()
    target = torch.empty_like(source)
    copy = device.seconds(lambda: target.copy_(source), 5)
    side = 8192 if device.cuda else 256
    left = torch.randn(side, side, dtype=torch.bfloat16, device=device.device)
    product = device.seconds(lambda: left @ left, 5)
    return Rates(2 * 2 * size / copy, 2 * side**3 / product, "measured copy and product")


def decode_work(shape: str, batch: int, context: float) -> tuple[float, float]:
    """Return bytes (weights and KV, each read once) and FLOPs of a step of `batch` decodes at `context` tokens each, in bfloat16."""
    sizes, weights = SHAPES[shape], sum(weight_bytes(shape))
    each = sizes["num_hidden_layers"] * head_dim(shape)
    kv = 2 * 2 * each * kv_heads(shape)  # bytes of a token
    return weights + batch * context * kv, batch * (weights + 4 * each * sizes["num_attention_heads"] * context)


def prefill_work(shape: str, tokens: int) -> tuple[float, float]:
    """Return bytes (weights) and FLOPs of a prompt of `tokens` in one step; the head computes one token."""
    sizes, (weights, head) = SHAPES[shape], weight_bytes(shape)
    attention = 4 * sizes["num_hidden_layers"] * sizes["num_attention_heads"] * head_dim(shape) * tokens * (tokens + 1) / 2
    return weights + head, weights * tokens + head + attention


def requests_work(shape: str, requests: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return bytes and FLOPs of requests as (prompt, new tokens) in the fewest steps: all prompts in one, then decodes of all together."""
    prompts = [prefill_work(shape, prompt) for prompt, _ in requests]
    moved, flops = prompts[0][0], sum(flops for _, flops in prompts)
    for step in range(1, max(new for _, new in requests)):
        contexts = [prompt + step for prompt, new in requests if new > step]
        more = decode_work(shape, len(contexts), sum(contexts) / len(contexts))
        moved, flops = moved + more[0], flops + more[1]
    return moved, flops


def beside_roofline(row: dict[str, Any], rates: Rates, work: tuple[float, float], seconds: float) -> dict[str, Any]:
    """Return `row` with the shortest possible time of `work`, and that time as a share of `seconds`."""
    return row | {"roofline_ms": rates.seconds(*work) * 1e3, "of_roofline": rates.share(work, seconds)}

"""Triton kernels that round rows to float8. One program computes one row, in registers."""

from typing import Any

import torch
import triton
import triton.language as tl

from fairlead_worker.kernels.prebuild import triton_driver
from fairlead_worker.model.lowbit.rows import FLOAT8, GROUP, ROWS, Rounded, TorchRounder

WIDEST = 32768
"""Numbers of a row that a program can hold. Wider rows are rounded by torch, and not fused."""
KINDS = {"silu_and_mul": 0, "gelu_tanh_and_mul": 1, "gelu_and_mul": 2}


def use_prebuilt_driver() -> None:
    """Let Triton take the driver that the image build compiled (`kernels.prebuild`), where there is one, instead of looking for gcc."""
    driver = triton_driver()
    if driver.exists():
        triton.knobs.build.impl = lambda *_: str(driver)


@triton.jit
def _write(values, out, scales, row, width, stride, BLOCK: tl.constexpr, GROUPED: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    if GROUPED:  # scale [stride, groups], a column for each row
        groups = tl.reshape(values, (BLOCK // 128, 128))
        scale = tl.maximum(tl.max(tl.abs(groups), 1) / 448.0, 1e-12)
        places = tl.arange(0, BLOCK // 128)
        tl.store(scales + places * stride + row, scale, mask=places < width // 128)
        rounded = tl.reshape(groups / scale[:, None], (BLOCK,))
    else:
        scale = tl.maximum(tl.max(tl.abs(values), 0) / 448.0, 1e-12)
        tl.store(scales + row, scale)
        rounded = values / scale
    tl.store(out + row * width + columns, rounded.to(tl.float8e4nv), mask=columns < width)


@triton.jit
def _round_rows(inputs, out, scales, width, stride, BLOCK: tl.constexpr, GROUPED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(inputs + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    _write(values, out, scales, row, width, stride, BLOCK, GROUPED)


@triton.jit
def _add_norm_rows(
    update, residual, weight, out, scales, width, stride, eps, PLUS: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    places = row * width + columns
    total = tl.load(update + places, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual + places, total.to(residual.dtype.element_ty), mask=mask)
    factor = tl.rsqrt(tl.sum(total * total, 0) / width + eps)
    scaled = total * factor * (tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32) + PLUS)
    normed = scaled.to(update.dtype.element_ty)
    tl.store(update + places, normed, mask=mask)
    _write(normed.to(tl.float32), out, scales, row, width, stride, BLOCK, GROUPED)


@triton.jit
def _gated_rows(both, out, scales, width, stride, KIND: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(both + row * 2 * width + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + columns, mask=mask, other=0.0).to(tl.float32)
    if KIND == 0:
        active = gate * tl.sigmoid(gate)
    elif KIND == 1:  # 0.5 * (1 + tanh(x)) = sigmoid(2 * x)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    values = (active * up).to(both.dtype.element_ty).to(tl.float32)  # rounded as FlashInfer's kernel does
    _write(values, out, scales, row, width, stride, BLOCK, GROUPED)


class TritonRounder:
    """One kernel for each rounding."""

    fuses = True

    def __init__(self, blocks: bool = False) -> None:
        use_prebuilt_driver()
        self._blocks = blocks
        self._plain = TorchRounder(blocks)

    def round(self, inputs: torch.Tensor) -> Rounded:
        width = inputs.shape[-1]
        if width > WIDEST:
            return self._plain.round(inputs)
        rows = inputs.reshape(-1, width).contiguous()
        made, further = self._empty(len(rows), width, rows.device, tuple(inputs.shape))
        if len(rows):
            _round_rows[(len(rows),)](rows, made.values, made.scale, width, **further)
        return made

    def add_norm(self, update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> Rounded:
        assert update.is_contiguous() and residual.is_contiguous()
        count, width = update.shape
        made, further = self._empty(count, width, update.device, (count, width))
        if count:
            plus = 1.0 if plus_one else 0.0
            _add_norm_rows[(count,)](update, residual, weight, made.values, made.scale, width, eps=eps, PLUS=plus, **further)
        return made

    def gated(self, both: torch.Tensor, activation: str) -> Rounded:
        width = both.shape[-1] // 2
        rows = both.reshape(-1, 2 * width).contiguous()
        made, further = self._empty(len(rows), width, both.device, (*both.shape[:-1], width))
        if len(rows):
            _gated_rows[(len(rows),)](rows, made.values, made.scale, width, KIND=KINDS[activation], **further)
        return made

    def _empty(self, count: int, width: int, device: torch.device, shape: tuple[int, ...]) -> tuple[Rounded, dict[str, Any]]:
        """Return room for the result, and the kernels' further arguments. Raises ValueError if a row is too wide for a program."""
        if width > WIDEST:
            raise ValueError(f"rows of {width} are wider than {WIDEST}")
        padded = count + -count % ROWS if self._blocks else count
        groups = width // GROUP if self._blocks else 1
        values = torch.empty(padded, width, dtype=FLOAT8, device=device)
        scale = torch.empty(groups, padded, dtype=torch.float32, device=device).t()
        block = max(triton.next_power_of_2(width), GROUP)
        further = {"stride": padded, "BLOCK": block, "GROUPED": self._blocks, "num_warps": min(max(block // 512, 4), 16)}
        return Rounded(values, scale, shape), further

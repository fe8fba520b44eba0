"""Triton kernel: rows of tokens times the weights of their experts, which stay in 8 or 4 bits in memory.

A program computes a tile of one expert's rows. It finds its expert from the counts on the device, so the host waits for nothing and a
CUDA graph fits any routing. Rows are read from where the tokens are, and written to the place of their pair, so no kernel moves them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fairlead_worker.model.lowbit.experts import ExpertWeights, Route, Scales
from fairlead_worker.model.lowbit.kernels.rows import use_prebuilt_driver
from fairlead_worker.model.lowbit.rows import Rounded

OUTPUTS = 128
"""Outputs of a tile: at most those of a block, so that a tile has one scale."""
INPUTS = 128
"""Inputs of one step of a tile: those of a block."""


class Tile(NamedTuple):
    """Rows of a tile, for steps whose experts have so many rows."""

    most: int
    """Mean rows of an expert up to which this tile is used."""
    rows: int
    warps: int
    stages: int
    """Loads under way at once; 99 KiB of shared memory (8.6, 8.9) hold them in 16 bits too."""


TILES = (Tile(16, 16, 4, 4), Tile(64, 64, 4, 3), Tile(1 << 30, 128, 8, 3))


@triton.jit
def _widen(bits):
    """float8 (e4m3) of 8 bits -> bfloat16 / 256, exact: GPUs before 8.9 do not convert float8."""
    wide = bits.to(tl.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)  # as float16, whose exponent has 8 more
    return half.to(tl.float16, bitcast=True).to(tl.bfloat16)


@triton.jit(do_not_specialize=["pairs", "experts", "each", "stride"])
def _multiply(
    inputs, input_scale, weight, weight_scale, out, order, ends, pairs, experts, each, stride, width, outputs,
    BLOCKS: tl.constexpr, GROUPS: tl.constexpr, ROUNDED: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    numbers = tl.arange(0, EXPERTS)
    last = tl.load(ends + numbers, mask=numbers < experts, other=pairs)
    first = tl.load(ends + numbers - 1, mask=(numbers > 0) & (numbers < experts), other=0)
    first = tl.where(numbers < experts, first, last)
    tiles = (last - first + ROWS - 1) // ROWS
    until = tl.cumsum(tiles, 0)
    tile = tl.program_id(1)
    expert = tl.sum((until <= tile).to(tl.int32), 0)
    if expert < experts:
        mine = numbers == expert
        begin = tl.sum(tl.where(mine, first + (tile - until + tiles) * ROWS, 0), 0)
        rows = begin + tl.arange(0, ROWS)
        taken = rows < tl.sum(tl.where(mine, last, 0), 0)
        pair = tl.load(order + rows, mask=taken, other=0)
        source = pair // each
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < outputs
        steps = tl.arange(0, STEP)
        packed: tl.constexpr = 2 if GROUPS else 1  # numbers of a byte
        weight += expert.to(tl.int64) * outputs * (width // packed)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for begin_step in range(0, width, STEP):
            places = begin_step + steps
            left = tl.load(inputs + source[:, None] * width + places[None, :], mask=taken[:, None] & (places < width)[None, :], other=0.0)
            bytes_at = begin_step // packed + tl.arange(0, STEP // packed)
            at = weight + columns[None, :] * (width // packed) + bytes_at[:, None]
            within = inside[None, :] & (bytes_at < width // packed)[:, None]
            if GROUPS:
                groups = begin_step // 32 + tl.arange(0, STEP // 32)
                scales_at = weight_scale + (expert.to(tl.int64) * outputs + columns[:, None]) * (width // 32) + groups[None, :]
                scales = tl.load(scales_at, mask=inside[:, None] & (groups < width // 32)[None, :], other=0)
                partial = tl.dot_scaled(left, None, "bf16", tl.load(at, mask=within, other=0), scales, "e2m1")
            elif ROUNDED:
                partial = tl.dot(left, tl.load(at, mask=within, other=0.0))
            else:
                partial = tl.dot(left, _widen(tl.load(at, mask=within, other=0))) * 256.0
            if BLOCKS:
                block = (expert.to(tl.int64) * tl.cdiv(outputs, 128) + tl.program_id(0) * COLUMNS // 128) * tl.cdiv(width, 128)
                partial *= tl.load(weight_scale + block + begin_step // 128)
                if ROUNDED:
                    partial *= tl.load(input_scale + begin_step // 128 * stride + source, mask=taken, other=0.0)[:, None]
            total += partial
        if not BLOCKS and not GROUPS:
            total *= tl.load(weight_scale + expert.to(tl.int64) * outputs + columns, mask=inside, other=0.0)[None, :]
            if ROUNDED:
                total *= tl.load(input_scale + source, mask=taken, other=0.0)[:, None]
        target = out + pair[:, None] * outputs + columns[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=taken[:, None] & inside[None, :])


class TritonProduct:
    """One kernel for each product."""

    def __init__(self) -> None:
        use_prebuilt_driver()

    def multiply(self, inputs: torch.Tensor | Rounded, weights: ExpertWeights, route: Route, each: int) -> torch.Tensor:
        experts, outputs, _ = weights.values.shape
        pairs = len(route.order)
        made = torch.empty(pairs, outputs, dtype=torch.bfloat16, device=weights.values.device)
        if not pairs:
            return made
        rounded = isinstance(inputs, Rounded)
        values, scale = (inputs.values, inputs.scale) if isinstance(inputs, Rounded) else (inputs.contiguous(), weights.scale)
        tile = next(tile for tile in TILES if pairs <= tile.most * experts)
        grid = (triton.cdiv(outputs, OUTPUTS), pairs // tile.rows + min(experts, pairs))
        _multiply[grid](
            values, scale, weights.values if rounded else weights.values.view(torch.uint8), weights.scale, made, route.order, route.ends,
            pairs, experts, each, scale.stride(-1), weights.inputs, outputs,
            BLOCKS=weights.scales is Scales.BLOCKS, GROUPS=weights.scales is Scales.GROUPS, ROUNDED=rounded,
            EXPERTS=triton.next_power_of_2(experts), ROWS=tile.rows, COLUMNS=OUTPUTS, STEP=INPUTS,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return made

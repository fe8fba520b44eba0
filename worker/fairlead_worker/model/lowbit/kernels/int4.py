"""A Triton kernel that widens 4-bit weights to bfloat16: it reads half a byte of each number and writes two."""

import torch
import triton
import triton.language as tl

from fairlead_worker.model.lowbit.kernels.rows import use_prebuilt_driver

OUTPUTS, INPUTS = 32, 128
"""Numbers of a program."""


@triton.jit
def _widen(weight, pairs, out, outputs, inputs, GROUP: tl.constexpr, TILES: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    row = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    column = tl.program_id(0) * INPUTS + tl.arange(0, INPUTS)[None, :]
    mask = (row < outputs) & (column < inputs)
    wide: tl.constexpr = 16 * TILES
    lane = row % 8 * 4 + column % 8 // 2
    word = ((row // 8 * (inputs // wide) + column // wide) * 32 + lane) * (TILES // 2) + column % wide // 32
    code = (tl.load(weight + word, mask=mask, other=0) >> (4 * (column % 32 // 8 + column % 2 * 4))) & 15
    pair = tl.load(pairs + column // GROUP * outputs + row, mask=mask, other=0)  # bfloat16 scale in the lower half, zero in the upper
    scale = (pair << 16).to(tl.float32, bitcast=True)
    zero = (pair & -65536).to(tl.float32, bitcast=True)
    numbers = (code - 8).to(tl.float32) * scale + zero
    tl.store(out + row.to(tl.int64) * inputs + column, numbers.to(tl.bfloat16), mask=mask)


def widen(weight: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return a weight in the layout of `int4.pack` as [outputs, inputs] bfloat16. pairs: of `int4.scales_and_zeros`."""
    use_prebuilt_driver()
    tiles = 2 * weight.shape[3]
    outputs, inputs = 8 * weight.shape[0], 16 * tiles * weight.shape[1]
    out = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=weight.device)
    grid = (triton.cdiv(inputs, INPUTS), triton.cdiv(outputs, OUTPUTS))
    words = pairs.view(torch.int32)
    _widen[grid](weight, words, out, outputs, inputs, GROUP=inputs // len(pairs), TILES=tiles, OUTPUTS=OUTPUTS, INPUTS=INPUTS)
    return out

"""Triton kernels for 4-bit weights in the layout of `int4.pack`: a product, and one that widens them to bfloat16.

A pair of bfloat16 is read as one word: the scale in the lower half, the zero in the upper one.
"""

import torch
import triton
import triton.language as tl

OUTPUTS, INPUTS = 32, 128
"""Numbers of a program that widens."""
MOST_ROWS = 64
"""Rows of a program that multiplies."""
WIDE = 8192
"""From so many outputs on, a program computes 32 of them, else 16, so that there are programs for all processors."""


@triton.jit
def _widen(weight, pairs, out, outputs, inputs, GROUP: tl.constexpr, TILES: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    row = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    column = tl.program_id(0) * INPUTS + tl.arange(0, INPUTS)[None, :]
    mask = (row < outputs) & (column < inputs)
    wide: tl.constexpr = 16 * TILES
    lane = row % 8 * 4 + column % 8 // 2
    word = ((row // 8 * (inputs // wide) + column // wide) * 32 + lane) * (TILES // 2) + column % wide // 32
    code = (tl.load(weight + word, mask=mask, other=0) >> (4 * (column % 32 // 8 + column % 2 * 4))) & 15
    pair = tl.load(pairs + column // GROUP * outputs + row, mask=mask, other=0)
    scale = (pair << 16).to(tl.float32, bitcast=True)
    zero = (pair & -65536).to(tl.float32, bitcast=True)
    numbers = (code - 8).to(tl.float32) * scale + zero
    tl.store(out + row.to(tl.int64) * inputs + column, numbers.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _multiply(
    rows, weight, pairs, out, count, outputs, inputs, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, 128)
    group = tl.arange(0, GROUPS)
    read, written = row[:, None] < count, output[:, None] < outputs
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for tile in range(inputs // 128):
        # The 128 inputs of an output are 16 words side by side.
        words = ((output // 8) * (inputs // 128) + tile) * 128 + output % 8 * 16
        bits = tl.load(weight + words[:, None] + tl.arange(0, 16)[None, :], mask=written, other=0)
        codes = (bits[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
        codes = tl.permute(tl.reshape(codes, (OUTPUTS, 4, 4, 2, 4)), (0, 2, 4, 1, 3))  # `int4.unpack`
        places = (tile * 128 + group * (128 // GROUPS)) // GROUP * outputs
        pair = tl.load(pairs + output[:, None] + places[None, :], mask=written, other=0)
        scale = (pair << 16).to(tl.float32, bitcast=True)
        zero = (pair & -65536).to(tl.float32, bitcast=True)
        codes = tl.reshape(codes, (OUTPUTS, GROUPS, 128 // GROUPS))
        numbers = tl.reshape((codes - 8).to(tl.float32) * scale[:, :, None] + zero[:, :, None], (OUTPUTS, 128)).to(tl.bfloat16)
        values = tl.load(rows + row[:, None] * inputs + tile * 128 + column[None, :], mask=read, other=0.0)
        total = tl.dot(values, tl.trans(numbers), total)
    places = row[:, None] * outputs + output[None, :]
    tl.store(out + places, total.to(tl.bfloat16), mask=read & (output[None, :] < outputs))


def widen(weight: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return a packed weight as [outputs, inputs] bfloat16. pairs: of `int4.scales_and_zeros`."""
    tiles = 2 * weight.shape[3]
    outputs, inputs = 8 * weight.shape[0], 16 * tiles * weight.shape[1]
    out = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=weight.device)
    grid = (triton.cdiv(inputs, INPUTS), triton.cdiv(outputs, OUTPUTS))
    words = pairs.view(torch.int32)
    _widen[grid](weight, words, out, outputs, inputs, GROUP=inputs // len(pairs), TILES=tiles, OUTPUTS=OUTPUTS, INPUTS=INPUTS)
    return out


def multiply(rows: torch.Tensor, weight: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return rows [T, inputs] times a packed weight with 8 tiles of inputs side by side: [T, outputs] bfloat16."""
    (count, inputs), outputs = rows.shape, 8 * weight.shape[0]
    assert weight.shape[3] == 4 and rows.is_contiguous()
    out = torch.empty(count, outputs, dtype=torch.bfloat16, device=rows.device)
    group = inputs // len(pairs)
    sizes = {"ROWS": min(max(triton.next_power_of_2(count), 16), MOST_ROWS), "OUTPUTS": 32 if outputs >= WIDE else 16}
    grid = (triton.cdiv(count, sizes["ROWS"]), triton.cdiv(outputs, sizes["OUTPUTS"]))
    further = {"GROUP": group, "GROUPS": max(128 // group, 1), "num_warps": 4, "num_stages": 4}
    _multiply[grid](rows, weight, pairs.view(torch.int32), out, count, outputs, inputs, **sizes, **further)
    return out

"""Triton's kernels in its interpreter, on the CPU, beside plain torch.

A program of its own (`TRITON_INTERPRET=1 python -m tests.worker.model.lowbit.interpreted`), because Triton decides at its import whether
to interpret. Prints "kernel: largest difference" and ends with 1 if
one is too large.
"""

import sys
from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import numpy as np
import torch
import triton.language as tl
from tests.worker.model.lowbit.reference import ReferenceRounder
from triton.runtime import interpreter

from fairlead_worker.model.lowbit import int4
from fairlead_worker.model.lowbit.experts import PlainProduct, Scales, draw_weights, find_route
from fairlead_worker.model.lowbit.kernels.experts import TILES, TritonProduct
from fairlead_worker.model.lowbit.kernels.int4 import multiply, widen
from fairlead_worker.model.lowbit.kernels.rows import KINDS, WIDEST, TritonRounder
from fairlead_worker.model.lowbit.rows import FLOAT8, GROUP, Rounded, TorchRounder, dequantized

Pair = tuple[torch.Tensor, torch.Tensor]
STEP = 2**-3
"""The largest step of float8 over the number: numbers that differ in their last bit may be rounded to two neighbours."""

SUMS = 2**-8
"""Of the norm: products of the same numbers in another order, rounded to bfloat16."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}


def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert as a GPU does: the interpreter (3.9) loses the carry of a mantissa that is rounded up to the next power of 2."""
    bits = {8: (np.uint8, torch.uint8), 16: (np.uint16, torch.uint16), 32: (np.uint32, torch.uint32)}
    raw = np.frombuffer(numbers.tobytes(), dtype=bits[source.primitive_bitwidth][0]).copy()
    made = torch.from_numpy(raw).view(DTYPES[str(source)]).to(DTYPES[str(target)])
    return made.view(bits[target.primitive_bitwidth][1]).numpy().reshape(numbers.shape)


def dot(self: Any, left: Any, right: Any, total: Any, *settings: Any) -> Any:
    """Multiply numbers: the interpreter (3.9) multiplies the bits of bfloat16 as integers."""
    wide = [
        interpreter.TensorHandle(convert(part.data, part.dtype, tl.float32, None).view(np.float32), tl.float32)
        if part.dtype == tl.bfloat16
        else part
        for part in (left, right)
    ]
    return create_dot(self, *wide, total, *settings)


interpreter._convert_float = convert
create_dot = interpreter.InterpreterBuilder.create_dot
interpreter.InterpreterBuilder.create_dot = dot


def off(got: Rounded, want: Rounded) -> float:
    """Return the largest difference over the number's size, or over a thousandth of the token's largest."""
    assert got.values.shape == want.values.shape and got.scale.shape == want.scale.shape and got.shape == want.shape
    assert got.scale.stride() == want.scale.stride() or 1 in got.scale.shape
    numbers, exact = dequantized(got), dequantized(want)
    size = exact.abs().clamp(min=1e-3 * float(exact.abs().amax()))
    return float(((numbers - exact).abs() / size).max()) if exact.numel() else 0.0


def rows() -> Iterator[tuple[str, float]]:
    drawn = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn).to(torch.bfloat16)

    for blocks, width in ((False, 256), (False, 200), (True, 256), (True, 640)):
        triton, plain = TritonRounder(blocks), ReferenceRounder(blocks)
        inputs = draw(1, 5, width)
        inputs[0, 1] *= 100
        inputs[0, 3] = 0
        name = f"{'blocks of ' if blocks else ''}{width}"
        yield f"round, {name}", off(triton.round(inputs), plain.round(inputs))
        assert not dequantized(triton.round(inputs))[3].any()
        for plus_one in (False, True):
            update, residual, weight = draw(5, width), draw(5, width), draw(width)
            copies = update.clone(), residual.clone()
            got, want = triton.add_norm(update, residual, weight, 1e-5, plus_one), plain.add_norm(*copies, weight, 1e-5, plus_one)
            yield f"add_norm, {name}, {plus_one}", off(got, want)
            yield f"its sum, {name}", float((residual != copies[1]).sum())
            yield f"its norm, {name}", float(((update - copies[0]).abs() / copies[0].abs().clamp(min=0.01)).max())
        for kind in KINDS:
            both = draw(5, 2 * width)
            yield f"{kind}, {name}", off(triton.gated(both, kind), plain.gated(both, kind))
        wide = draw(2, WIDEST + GROUP)
        yield f"round, wider than a program{', blocks' if blocks else ''}", off(triton.round(wide), plain.round(wide))


def widened() -> Iterator[tuple[str, float]]:
    drawn = torch.Generator().manual_seed(4)
    for outputs, inputs, group in ((40, 256, 128), (64, 320, 64), (8, 96, 32), (32, 512, 256)):
        codes = torch.randint(0, 16, (outputs, inputs), generator=drawn).to(torch.uint8)
        scale = torch.rand(outputs, inputs // group, generator=drawn) + 0.1
        zero = torch.randint(0, 17, scale.shape, generator=drawn)
        weight, pairs = int4.pack(codes), int4.scales_and_zeros(scale, zero)
        wide = int4.widen(weight, pairs)
        yield f"widen, {outputs} by {inputs}, wrong numbers", float((widen(weight, pairs) != wide).sum())
        for count in (1, 20, 65) if inputs % 128 == 0 else ():
            values = torch.randn(count, inputs, generator=drawn).to(torch.bfloat16)
            got, want = multiply(values, weight, pairs).float(), values.float() @ wide.float().T
            yield f"multiply, {count} rows, {outputs} by {inputs}", float(((got - want).abs() / want.abs().clamp(min=0.1)).max())


def products() -> Iterator[tuple[str, float]]:
    """Each form and tile, with experts without rows, and sizes that are no multiples of a tile."""
    drawn, experts, cpu = torch.Generator().manual_seed(4), 3, torch.device("cpu")
    sizes = ((Scales.BLOCKS, 256, 384), (Scales.BLOCKS, 192, 128), (Scales.ROWS, 208, 144), (Scales.GROUPS, 208, 160))
    for scales, outputs, width in sizes:
        weights = draw_weights(experts, outputs, width, scales, drawn, cpu)
        if scales is not Scales.GROUPS:
            small = weights.values[0, :8, :8]  # gets numbers with the smallest exponent, whose bits are converted in another way
            small.copy_((small.float() * 2**-7).to(FLOAT8))
        for rounds, (tokens, each) in product((False, True), ((1, 2), (2 * TILES[0].most, 1), (2 * TILES[1].most, 2))):
            if rounds and scales is Scales.GROUPS:
                continue
            inputs = torch.randn(2 * tokens // each, width, generator=drawn).to(torch.bfloat16)
            given = TorchRounder(scales is Scales.BLOCKS).round(inputs) if rounds else inputs
            chosen = torch.randint(2, (tokens, 2), generator=drawn) * 2  # the expert in the middle has no rows
            route = find_route(chosen, torch.arange(experts))
            got, want = (way.multiply(given, weights, route, each).float() for way in (TritonProduct(), PlainProduct()))
            name = f"{scales.value}, {outputs} by {width}, {'rounded' if rounds else 'widened'}, {tokens} tokens, rows of {each}"
            yield name, float((got - want).norm() / want.norm())


def main() -> int:
    worst = 0.0
    for found, most in ((chain(rows(), widened()), STEP), (products(), SUMS)):
        for name, difference in found:
            print(f"{name}: {difference:.2e}")
            worst = max(worst, difference / most)
    return int(not worst <= 1)


if __name__ == "__main__":
    sys.exit(main())

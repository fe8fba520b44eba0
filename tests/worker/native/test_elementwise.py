"""The small operations of a decoder layer against torch."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from fairlead_worker.native.decoder import AROUND_MEAN, ROOT_MEAN_SQUARE, Norm, Rope
from fairlead_worker.native.library import native, pointer

pytestmark = pytest.mark.skipif(native() is None, reason="the native library is not built, or not for this CPU")
KINDS = {torch.float32: 0, torch.bfloat16: 1}
TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-5}}
both = pytest.mark.parametrize("dtype", KINDS, ids=str)
kinds = pytest.mark.parametrize("around_mean", [False, True], ids=["root mean square", "around the mean"])


@dataclass
class Values:
    """A norm: of `width` values at a time; bias None: a root mean square norm. Without values it leaves all as it is."""

    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    width: int = 0

    @classmethod
    def random(cls, width: int, around_mean: bool, times: int = 1) -> "Values":
        return cls(torch.randn(width * times), torch.randn(width * times) if around_mean else None, width)

    @property
    def native(self) -> Norm:
        if self.weight is None:
            return Norm()
        kind = ROOT_MEAN_SQUARE if self.bias is None else AROUND_MEAN
        return Norm(pointer(self.weight), None if self.bias is None else pointer(self.bias), self.width, 1e-6, kind)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The answer in float64, of x [tokens, width times any]."""
        if self.weight is None:
            return x.double()
        parts = x.double().unflatten(1, (-1, self.width))
        parts = parts if self.bias is None else parts - parts.mean(-1, keepdim=True)
        parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + 1e-6)
        return parts.flatten(1) * self.weight + (0 if self.bias is None else self.bias)


def call(name: str, *arguments: object) -> None:
    library = native()
    assert library is not None

    def convert(argument: object) -> object:
        if isinstance(argument, ctypes.Structure):
            return ctypes.byref(argument)
        return (
            ctypes.c_int64(argument) if isinstance(argument, int) else pointer(argument) if isinstance(argument, torch.Tensor) else argument
        )

    getattr(library, name)(2, *map(convert, arguments))


def normalise(
    residual: torch.Tensor, update: torch.Tensor | None, after: Values, before: Values | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    residual, normed = residual.clone(), torch.full(residual.shape, 7, dtype=dtype)
    norms = after.native, (before or Values()).native
    call("fairlead_normalise", residual, update, *norms, before and normed, ctypes.c_int32(KINDS[dtype]), *residual.shape)
    return residual, normed


@both
@kinds
@pytest.mark.parametrize("width", [1, 15, 64, 100, 768])
def test_norms_with_the_residual(dtype: torch.dtype, width: int, around_mean: bool) -> None:
    residual, update = torch.randn(5, width) * 4 + 2, torch.randn(5, width) - 1
    after, before = (Values.random(width, around_mean) for _ in range(2))
    added, normed = normalise(residual, update, after, before, dtype)
    torch.testing.assert_close(added, (residual + after(update)).float(), **TOLERANCE[torch.float32])
    torch.testing.assert_close(normed, before(added).to(dtype), **TOLERANCE[dtype])
    same, normed = normalise(residual, None, Values(), before, dtype)
    assert torch.equal(same, residual)
    torch.testing.assert_close(normed, before(residual).to(dtype), **TOLERANCE[dtype])
    again, untouched = normalise(residual, update, after, None, dtype)
    assert torch.equal(again, added)
    assert untouched.eq(7).all()


@both
def test_sums_without_norms(dtype: torch.dtype) -> None:
    residual, update = torch.randn(5, 100), torch.randn(5, 100)
    added, normed = normalise(residual, update, Values(), Values(), dtype)
    assert torch.equal(added, residual + update)
    assert torch.equal(normed, added.to(dtype))


def rotate(
    x: torch.Tensor,
    heads: int,
    kv_heads: int,
    dim: int,
    norms: Sequence[Values],
    half: int,
    positions: list[int],
    neighbours: bool = False,
    growth: torch.Tensor | None = None,
    before_norms: bool = False,
) -> torch.Tensor:
    """The kernel on x [tokens, width]."""
    x = x.clone()
    cosine, sine = tables(half)
    if neighbours:
        cosine, sine = cosine.repeat_interleave(2, -1), torch.stack((-sine, sine), -1).flatten(-2)
    rope = Rope(pointer(cosine), pointer(sine), None if growth is None else pointer(growth), half, neighbours, before_norms)
    shape = (ctypes.c_int32(heads), ctypes.c_int32(kv_heads), ctypes.c_int32(dim))
    given = (torch.tensor(positions), ctypes.c_int32(KINDS[x.dtype]), len(x), x, x.shape[1])
    call("fairlead_rotate", *shape, *(norm.native for norm in norms), rope, *given)
    return x


def tables(half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(64)[:, None] / 100 ** (torch.arange(half) / half)
    return angles.cos(), angles.sin()


def turned(x: torch.Tensor, half: int, positions: list[int], neighbours: bool) -> torch.Tensor:
    """The answer for heads [tokens, heads, dim]."""
    cosine, sine = (table[positions][:, None] for table in tables(half))
    some, rest = x[..., : 2 * half], x[..., 2 * half :]
    low, high = (some[..., ::2], some[..., 1::2]) if neighbours else some.chunk(2, -1)
    pairs = (low * cosine - high * sine, high * cosine + low * sine)
    return torch.cat([torch.stack(pairs, -1).flatten(-2) if neighbours else torch.cat(pairs, -1), rest], -1)


HEADS, KV_HEADS = 4, 2


@both
@pytest.mark.parametrize("neighbours", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("normed", ["none", "each", "each around its mean", "all", "all around their mean"])
@pytest.mark.parametrize("grows", [False, True], ids=["", "queries grow"])
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (128, 64), (80, 40), (64, 8), (6, 3)])
def test_rope_with_head_norms(dtype: torch.dtype, dim: int, half: int, grows: bool, normed: str, neighbours: bool) -> None:
    positions = [0, 7, 63, 5]
    x = torch.randn(len(positions), (HEADS + 2 * KV_HEADS) * dim, dtype=dtype)
    norms = [Values(), Values()]
    if normed != "none":
        parts = [(heads * dim, 1) if normed.startswith("all") else (dim, heads) for heads in (HEADS, KV_HEADS)]
        norms = [Values.random(width, normed.endswith("mean"), times) for width, times in parts]
    growth = 1 + torch.arange(64) / 8 if grows else None
    got = rotate(x, HEADS, KV_HEADS, dim, norms, half, positions, neighbours, growth)
    queries, keys, values = x.split([HEADS * dim, KV_HEADS * dim, KV_HEADS * dim], 1)
    query, key = (
        turned(norm(part).unflatten(1, (-1, dim)), half, positions, neighbours) for norm, part in zip(norms, (queries, keys), strict=True)
    )
    query = query if growth is None else query * growth[positions][:, None, None]
    close = {**TOLERANCE[dtype], "atol": 2e-5 if dtype == torch.float32 else 1e-2}
    torch.testing.assert_close(got, torch.cat([query.flatten(1), key.flatten(1), values], 1).to(dtype), **close)
    assert torch.equal(got[:, -KV_HEADS * dim :], values)


@both
def test_heads_can_be_rotated_before_their_norms(dtype: torch.dtype) -> None:
    dim, half, positions = 64, 32, [3, 60]
    x = torch.randn(2, (HEADS + 2 * KV_HEADS) * dim, dtype=dtype)
    norms = [Values.random(dim, False, heads) for heads in (HEADS, KV_HEADS)]
    got = rotate(x, HEADS, KV_HEADS, dim, norms, half, positions, before_norms=True)
    parts = x.double().split([HEADS * dim, KV_HEADS * dim, KV_HEADS * dim], 1)
    query, key = (turned(part.unflatten(1, (-1, dim)), half, positions, False).flatten(1).to(dtype) for part in parts[:2])
    want = torch.cat([norms[0](query), norms[1](key), parts[2]], 1).to(dtype)
    torch.testing.assert_close(got, want, **{**TOLERANCE[dtype], "atol": 1e-5 if dtype == torch.float32 else 3e-2})


@both
@kinds
@pytest.mark.parametrize("neighbours", [False, True], ids=["halves", "neighbours"])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, neighbours: bool, around_mean: bool) -> None:
    residual, update, before = torch.randn(9, 96), torch.randn(9, 96), Values.random(96, around_mean)
    whole = normalise(residual, update, before, before, dtype)
    qkv, norms = torch.randn(9, 8 * 16).to(dtype), [Values.random(16, around_mean, heads) for heads in (HEADS, KV_HEADS)]
    all_turned = rotate(qkv, HEADS, KV_HEADS, 16, norms, 8, list(range(9)), neighbours)
    for row in range(9):
        assert torch.equal(rotate(qkv[row : row + 1], HEADS, KV_HEADS, 16, norms, 8, [row], neighbours)[0], all_turned[row])
        alone = normalise(residual[row : row + 1], update[row : row + 1].clone(), before, before, dtype)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, whole, strict=True))

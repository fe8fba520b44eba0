"""The small operations of a decoder layer against torch."""

import ctypes

import pytest
import torch

from fairlead_worker.native.library import native, pointer

pytestmark = pytest.mark.skipif(native() is None, reason="the native library is not built, or not for this CPU")
KINDS = {torch.float32: 0, torch.bfloat16: 1}
TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-5}}
both = pytest.mark.parametrize("dtype", KINDS, ids=str)
eps = ctypes.c_float(1e-6)


def call(name: str, *arguments: object) -> None:
    library = native()
    assert library is not None
    getattr(library, name)(
        2, *[ctypes.c_int64(a) if isinstance(a, int) else pointer(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    )


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6).float() * weight


def normalise(
    residual: torch.Tensor, update: torch.Tensor | None, after: torch.Tensor | None, before: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    residual, normed = residual.clone(), torch.full(residual.shape, 7, dtype=dtype)
    given = (None if before is None else normed, ctypes.c_int32(KINDS[dtype]), *residual.shape)
    call("fairlead_normalise", residual, update, after, eps, before, eps, *given)
    return residual, normed


@both
@pytest.mark.parametrize("width", [1, 15, 64, 100, 768])
def test_norms_with_the_residual(dtype: torch.dtype, width: int) -> None:
    residual, update = torch.randn(5, width) * 4, torch.randn(5, width)
    after, before = torch.rand(width) + 0.5, torch.randn(width)
    added, normed = normalise(residual, update, after, before, dtype)
    torch.testing.assert_close(added, residual + norm(update, after), **TOLERANCE[torch.float32])
    torch.testing.assert_close(normed, norm(added, before).to(dtype), **TOLERANCE[dtype])
    same, normed = normalise(residual, None, None, before, dtype)
    assert torch.equal(same, residual)
    torch.testing.assert_close(normed, norm(residual, before).to(dtype), **TOLERANCE[dtype])
    again, untouched = normalise(residual, update, after, None, dtype)
    assert torch.equal(again, added)
    assert untouched.eq(7).all()


def rotate(
    x: torch.Tensor, heads: int, kv_heads: int, dim: int, norms: list[torch.Tensor] | None, half: int, positions: list[int]
) -> torch.Tensor:
    """The kernel on x [tokens, width]."""
    x = x.clone()
    cosine, sine = tables(half)
    query, key = norms or (None, None)
    shape = (ctypes.c_int32(heads), ctypes.c_int32(kv_heads), ctypes.c_int32(dim))
    where = torch.tensor(positions)
    call("fairlead_rotate", *shape, query, key, eps, cosine, sine, half, where, ctypes.c_int32(KINDS[x.dtype]), len(x), x, x.shape[1])
    return x


def tables(half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(64)[:, None] / 100 ** (torch.arange(half) / half)
    return angles.cos(), angles.sin()


@both
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (128, 64), (80, 40), (64, 8), (6, 3)])
def test_rope_with_head_norms(dtype: torch.dtype, dim: int, half: int, normed: bool) -> None:
    heads, kv_heads, positions = 4, 2, [0, 7, 63, 5]
    x = torch.randn(len(positions), (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = [torch.randn(dim), torch.randn(dim)] if normed else None
    got = rotate(x, heads, kv_heads, dim, norms, half, positions)
    turned = (heads + kv_heads) * dim
    assert torch.equal(got[:, turned:], x[:, turned:])
    want = x[:, :turned].float().view(len(positions), -1, dim)
    if norms:
        want = torch.cat([norm(want[:, :heads], norms[0]), norm(want[:, heads:], norms[1])], 1)
    cosine, sine = (table[positions][:, None] for table in tables(half))
    low, high, rest = want.split([half, half, dim - 2 * half], -1)
    want = torch.cat([low * cosine - high * sine, high * cosine + low * sine, rest], -1)
    torch.testing.assert_close(
        got[:, :turned].view(want.shape), want.to(dtype), **{**TOLERANCE[dtype], "atol": 2e-6 if dtype == torch.float32 else 1e-2}
    )


@both
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    residual, update, before = torch.randn(9, 96), torch.randn(9, 96), torch.randn(96)
    whole = normalise(residual, update, before, before, dtype)
    qkv, norms = torch.randn(9, 8 * 16).to(dtype), [torch.randn(16)] * 2
    turned = rotate(qkv, 4, 2, 16, norms, 8, list(range(9)))
    for row in range(9):
        assert torch.equal(rotate(qkv[row : row + 1], 4, 2, 16, norms, 8, [row])[0], turned[row])
        alone = normalise(residual[row : row + 1], update[row : row + 1].clone(), before, before, dtype)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, whole, strict=True))

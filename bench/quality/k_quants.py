"""A small quantizer for Q4_K, Q5_K and Q6_K of GGUF, which the package `gguf` can only read.

The layouts are those of llama.cpp (ggml-quants.c). Scales come from the extremes of each group. llama.cpp searches for better ones, so
its files are a little closer to the weights.
"""

import numpy as np
from gguf import GGMLQuantizationType as Type

Array = np.ndarray
GROUP = 256
"""Weights of a block."""


def quantize_k(weights: Array, kind: Type) -> Array:
    """Return [rows, columns] float32 as blocks [rows, bytes] uint8. The columns must fill blocks of 256."""
    blocks = weights.astype(np.float32).reshape(-1, GROUP)
    packed = _six(blocks) if kind == Type.Q6_K else _asymmetric(blocks, 4 if kind == Type.Q4_K else 5)
    return packed.reshape(len(weights), -1)


def _asymmetric(blocks: Array, bits: int) -> Array:
    """Q4_K and Q5_K: eight groups of 32, weight = d * scale * q - dmin * least, with scale and least in 6 bits."""
    groups = blocks.reshape(-1, 8, 32)
    levels = (1 << bits) - 1
    least = np.maximum(-groups.min(-1), 0)
    span = np.maximum(groups.max(-1) + least, 0) / levels
    d, scale = _six_bits(span)
    dmin, offset = _six_bits(least)
    step = (_widen(d) * scale)[..., None]
    q = _divide(groups + (_widen(dmin) * offset)[..., None], step).clip(0, levels).astype(np.uint8)
    low, high = q & 15, q >> 4
    pairs = low.reshape(-1, 4, 2, 32)
    parts = [d.view(np.uint8), dmin.view(np.uint8), _pack_scales(scale, offset)]
    if bits == 5:
        parts.append(np.bitwise_or.reduce(high << np.arange(8, dtype=np.uint8)[:, None], axis=1))
    return np.concatenate([*parts, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)], axis=1)


def _six(blocks: Array) -> Array:
    """Q6_K: 16 groups of 16, weight = d * scale * (q - 32), with scale in 8 bits."""
    groups = blocks.reshape(-1, 16, 16)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0] / -32
    d = (np.abs(extreme).max(-1, keepdims=True) / 127).astype(np.float16)
    scale = _divide(extreme, _widen(d)).clip(-128, 127).astype(np.int8)
    q = (_divide(groups, (_widen(d) * scale)[..., None]).clip(-32, 31) + 32).astype(np.uint8)
    low = (q & 15).reshape(-1, 2, 2, 64)
    high = (q >> 4).reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    nibbles = (low[:, :, 0] | low[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([nibbles, np.bitwise_or.reduce(high, axis=2).reshape(-1, 64), scale.view(np.uint8), d.view(np.uint8)], axis=1)


def _six_bits(values: Array) -> tuple[Array, Array]:
    """Return the common factor [blocks, 1] float16 and `values` [blocks, 8] as multiples of it from 0 to 63."""
    factor = (values.max(-1, keepdims=True) / 63).astype(np.float16)
    return factor, _divide(values, _widen(factor)).clip(0, 63).astype(np.uint8)


def _pack_scales(scale: Array, offset: Array) -> Array:
    """Return 12 bytes for 16 numbers of 6 bits."""
    first, last = (scale[:, :4], offset[:, :4]), (scale[:, 4:], offset[:, 4:])
    heads = [one | (other >> 4) << 6 for one, other in zip(first, last, strict=True)]
    return np.concatenate([*heads, (last[0] & 15) | (last[1] & 15) << 4], axis=1)


def _widen(factor: Array) -> Array:
    return np.asarray(factor, np.float32)


def _divide(values: Array, by: Array) -> Array:
    """Return the nearest integers of `values` / `by`; 0 where `by` is 0."""
    return np.asarray(np.rint(np.divide(values, by, out=np.zeros_like(values), where=by != 0)))

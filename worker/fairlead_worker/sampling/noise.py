"""Stateless randomness: a number from (seed, position), independent of the batch and of repeated steps."""

from collections.abc import Sequence

import numpy as np
import torch

from fairlead_worker.kernels.transfer import to_device

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return [n] float64 in [0, 1), one for each pair. Seeds are taken modulo 2**64.

    SplitMix64's finaliser (Steele, Lea and Flood 2014) is used as a counter-based generator: the position indexes the seed's own
    stream.
    """
    stream = _mix(np.array([seed & _MASK for seed in seeds], np.uint64) + _GOLDEN)
    bits = _mix(stream + np.array(positions, np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform_on(device: torch.device, seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Return the same numbers, bit for bit, as [n] float64 on `device`. They are computed there, so that positions can later live there."""
    if device.type == "cpu":
        return torch.from_numpy(uniform(seeds, positions))
    signed = [((seed + (1 << 63)) & _MASK) - (1 << 63) for seed in seeds]
    return uniform_tensor(to_device(signed, device, torch.int64), to_device(positions, device, torch.int64))


def uniform_tensor(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute [n] float64 from seeds and positions [n] int64 on any device; seeds as two's complement. Products wrap around in torch
    too.
    """
    stream = _mix_signed(seeds + _to_signed(_GOLDEN))
    bits = _mix_signed(stream + positions * _to_signed(_GOLDEN))
    return _shift_right(bits, 11).double() * 2.0**-53


def _mix_signed(x: torch.Tensor) -> torch.Tensor:
    """Compute `_mix` with signed integers, which every device of torch can multiply."""
    x = (x ^ _shift_right(x, 30)) * _to_signed(np.uint64(0xBF58476D1CE4E5B9))
    x = (x ^ _shift_right(x, 27)) * _to_signed(np.uint64(0x94D049BB133111EB))
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right with zeros; torch's own shift of signed numbers repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _to_signed(number: np.uint64) -> int:
    return int(number.astype(np.int64))


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed

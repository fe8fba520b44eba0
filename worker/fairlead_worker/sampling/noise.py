"""Stateless randomness: a number from (seed, position), independent of the batch and of repeated steps."""

from collections.abc import Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return [n] float64 in [0, 1), one for each pair. Seeds are taken modulo 2**64.

    SplitMix64's finaliser (Steele, Lea and Flood 2014) is used as a counter-based generator: the position indexes the seed's own
    stream. Numbers for a GPU are computed here too: one copy to the device instead of 35 small kernels.
    """
    stream = _mix(np.array([seed & _MASK for seed in seeds], np.uint64) + _GOLDEN)
    bits = _mix(stream + np.array(positions, np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed

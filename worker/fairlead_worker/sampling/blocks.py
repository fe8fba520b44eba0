"""Rows of a vocabulary in blocks: reduce each block once, then search the one that matters."""

import ctypes
from collections.abc import Callable

import torch

from fairlead_worker.native.library import native, pointer

BLOCK = 512
SHARED = 1 << 20
"""Number of logits that one thread searches as fast as several threads, which must be woken first."""


def reduce_blocks(rows: torch.Tensor, reduce: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """Reduce [rows, vocabulary] -> [rows, blocks]; the last block may be shorter."""
    full = rows.shape[1] // BLOCK * BLOCK
    parts = [reduce(rows[:, :full].view(len(rows), -1, BLOCK), 2)] if full else []
    if full < rows.shape[1]:
        parts.append(reduce(rows[:, full:], 1)[:, None])
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def take_blocks(rows: torch.Tensor, block: torch.Tensor, beyond: float) -> torch.Tensor:
    """Return one block of each row, [rows, BLOCK] for block [rows, 1], padded with `beyond` after the vocabulary."""
    places = block * BLOCK + torch.arange(BLOCK, device=rows.device)
    return rows.gather(1, places.clamp(max=rows.shape[1] - 1)).masked_fill_(places >= rows.shape[1], beyond)


def search_blocks(sums: torch.Tensor, weights: Callable[[torch.Tensor], torch.Tensor], share: torch.Tensor) -> torch.Tensor:
    """Return the token at which the share [rows] of a row's sum falls, first its block, then its place in it.

    sums [rows, blocks] float64; `weights`: block [rows, 1] -> its weights [rows, BLOCK] float64.
    """
    cumulative = sums.cumsum(1)
    target = _below(share, cumulative[:, -1])[:, None]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[1] - 1)
    rest = (target - (cumulative - sums).gather(1, block)) / sums.gather(1, block)
    return block[:, 0] * BLOCK + invert(weights(block), rest[:, 0].clamp(0, 1))


def invert(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the index at which the share [rows] of the weights' sum falls, for weights [rows, n] float64; never one of weight 0."""
    cumulative = weights.cumsum(1)
    target = _below(share, cumulative[:, -1])
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _below(share: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return share * total, always less than total in spite of rounding: no weight follows the last one."""
    return torch.minimum(share * total, torch.nextafter(total, torch.zeros_like(total)))


def largest(logits: torch.Tensor) -> torch.Tensor:
    """Return `argmax(1)`, the first of equals. A row with NaN gives some token.

    For bfloat16 this is many times faster than torch, which has vector code for `amax` but not for `argmax`, and needs no float32
    copy. For float32 on a CPU it is one call of the native library: after a step, the code of a dozen torch operations is no longer
    in the cache.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous() and (library := native()) is not None:
        tokens = torch.empty(len(logits), dtype=torch.int64)
        threads = torch.get_num_threads() if logits.numel() > SHARED else 1
        sizes = map(ctypes.c_int64, logits.shape)
        library.fairlead_largest(ctypes.c_int32(threads), pointer(logits), *sizes, pointer(tokens))
        return tokens
    maxima = reduce_blocks(logits, torch.amax)
    top = maxima.amax(1, keepdim=True)
    block = (maxima == top).byte().argmax(1, keepdim=True)
    inside = (take_blocks(logits, block, float("-inf")) == top).byte().argmax(1)
    return (block[:, 0] * BLOCK + inside).clamp_(max=logits.shape[1] - 1)

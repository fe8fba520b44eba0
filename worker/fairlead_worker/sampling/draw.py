"""Draw tokens: the inverse of the cumulative distribution at one uniform number a row, tokens in vocabulary order.

One number a row rather than Gumbel noise for each token: 150,000 times less noise to make, and as independent of the batch. For the same
reason exponentials come from `softmax`, which computes each row by itself: those of `exp` may differ in the last bit with their place in
memory, and so with the row's company.
"""

from collections.abc import Sequence

import torch

from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.messages import Sampling
from fairlead_worker.sampling.blocks import BLOCK, reduce_blocks, take_blocks
from fairlead_worker.sampling.filters import NARROW, WIDE, drop_unlikely, keep_among, keep_sorted, widths


def draw(logits: torch.Tensor, samplings: Sequence[Sampling], noise: torch.Tensor) -> torch.Tensor:
    """logits [rows, vocabulary] float32, noise [rows] float64 in [0, 1) -> tokens [rows] int64.

    Where logits are no numbers, or every token is forbidden, some token of the vocabulary: another id would fail the next step, and with
    it everybody's requests.
    """
    temperature = to_device([s.temperature for s in samplings], logits.device, logits.dtype)
    temperature.clamp_(min=torch.finfo(logits.dtype).tiny)  # 1e-50 is more than 0 for its sender, and 0 in float32
    # The largest is subtracted first, so that a tiny temperature cannot make infinity minus infinity.
    scaled = (logits - logits.amax(1, keepdim=True)).div_(temperature[:, None])
    tokens = torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
    rows = widths(samplings, logits.shape[1])
    unsorted = list(rows.sorted)
    filtered: list[tuple[list[int], torch.Tensor]] = []
    for some, width in ((rows.narrow, NARROW), (rows.wide, WIDE)):
        if some:
            index = to_device(some, logits.device)
            kept, ids, enough = keep_among(_take(scaled, index), [samplings[i] for i in some], width)
            tokens[index] = _among(kept, ids, noise[index])
            if any(not 0 < samplings[i].top_k <= width for i in some):  # top_k itself says that no more can stay
                filtered.append((some, enough))
    if rows.whole:
        index = to_device(rows.whole, logits.device)
        tokens[index] = _search(drop_unlikely(_take(scaled, index), [samplings[i] for i in rows.whole]), noise[index])
    # Last, for it waits for the device.
    for some, enough in filtered:
        unsorted += [i for i, fits in zip(some, enough.tolist(), strict=True) if not fits]
    if unsorted:
        index = to_device(unsorted, logits.device)
        tokens[index] = _search(keep_sorted(scaled[index], [samplings[i] for i in unsorted]), noise[index])
    return tokens


def _take(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """These rows, in order; all of them without a copy."""
    return logits if len(rows) == logits.shape[0] else logits[rows]


def _among(kept: torch.Tensor, ids: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A token of ids [rows, width] by its logits kept [rows, width]."""
    ids, order = ids.sort(1)
    chosen = _invert(kept.gather(1, order).softmax(1, dtype=torch.float64), noise)
    return ids.gather(1, chosen[:, None])[:, 0]


def _search(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A token of the whole vocabulary: first its block, then its place there. Sums of a block in float32, over the blocks in float64."""
    probabilities = logits.softmax(1)
    sums = reduce_blocks(probabilities, torch.sum).double()
    cumulative = sums.cumsum(1)
    target = _below(noise, cumulative[:, -1])[:, None]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[1] - 1)
    share = (target - (cumulative - sums).gather(1, block)) / sums.gather(1, block)
    inside = take_blocks(probabilities, block, 0.0).double()
    return (block[:, 0] * BLOCK + _invert(inside, share[:, 0].clamp(0, 1))).clamp_(max=logits.shape[1] - 1)


def _invert(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """weights [rows, n] float64, share [rows] of their sum -> the place in which it falls; none of weight 0."""
    cumulative = weights.cumsum(1)
    target = _below(share, cumulative[:, -1])
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _below(share: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """share * total, less than total whatever the rounding: behind the last weight there is nothing."""
    return torch.minimum(share * total, torch.nextafter(total, torch.zeros_like(total)))

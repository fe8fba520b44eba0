"""Draw tokens: invert the cumulative distribution at one uniform number per row, with tokens in vocabulary order.

One number per row instead of Gumbel noise for each token: 150,000 times less noise to generate, and as independent of the batch. For
the same reason exponentials come from `softmax`, which computes each row by itself. The last bit of `exp` may differ with a value's
place in memory, and so with the batch.
"""

from collections.abc import Sequence

import torch

from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.sampling.blocks import invert, reduce_blocks, search_blocks, take_blocks
from fairlead_worker.sampling.filters import NARROW, WIDE, drop_unlikely, keep_among, keep_sorted, widths


def draw(logits: torch.Tensor, samplings: Sequence[Sampling], noise: torch.Tensor) -> torch.Tensor:
    """Draw tokens [rows] int64 from logits [rows, vocabulary] float32 with noise [rows] float64 in [0, 1).

    On a device the host waits for rows that have a top_p and no top_k.

    If logits are NaN, or every token is forbidden, the result is some token of the vocabulary. An id outside it would fail the next
    step and with it every request.
    """
    temperature = to_device([s.temperature for s in samplings], logits.device, logits.dtype)
    temperature.clamp_(min=torch.finfo(logits.dtype).tiny)  # 1e-50 is greater than 0 for the client and 0 in float32
    # The largest logit is subtracted first, so that a tiny temperature cannot produce infinity minus infinity.
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
            if any(not 0 < samplings[i].top_k <= width for i in some):  # top_k itself guarantees that no more tokens can stay
                filtered.append((some, enough))
    if rows.whole:
        index = to_device(rows.whole, logits.device)
        tokens[index] = _search(drop_unlikely(_take(scaled, index), [samplings[i] for i in rows.whole]), noise[index])
    # Last, because it waits for the device.
    for some, enough in filtered:
        unsorted += [i for i, fits in zip(some, enough.tolist(), strict=True) if not fits]
    if unsorted:
        index = to_device(unsorted, logits.device)
        tokens[index] = _search(keep_sorted(scaled[index], [samplings[i] for i in unsorted]), noise[index])
    return tokens


def _take(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return these rows in order; all rows without a copy."""
    return logits if len(rows) == logits.shape[0] else logits[rows]


def _among(kept: torch.Tensor, ids: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Draw one of ids [rows, width] by its logits kept [rows, width]."""
    ids, order = ids.sort(1)
    chosen = invert(kept.gather(1, order).softmax(1, dtype=torch.float64), noise)
    return ids.gather(1, chosen[:, None])[:, 0]


def _search(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Draw a token of the whole vocabulary: first its block, then its place in it.

    Sums within a block are float32, sums over the blocks float64.
    """
    probabilities = logits.softmax(1)
    sums = reduce_blocks(probabilities, torch.sum).double()
    tokens = search_blocks(sums, lambda block: take_blocks(probabilities, block, 0.0).double(), noise)
    return tokens.clamp_(max=logits.shape[1] - 1)

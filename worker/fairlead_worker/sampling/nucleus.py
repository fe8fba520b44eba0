"""Draw among the tokens that top_p leaves of the whole vocabulary, without a sort and without waiting for the device.

A kernel finds the probability of the last token that top_p needs. Of the tokens with exactly this probability only the first ones are
needed, in vocabulary order, as after a stable sort. They are counted by blocks.
"""

from collections.abc import Sequence

import torch

from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.sampling.blocks import reduce_blocks, search_blocks, take_blocks
from fairlead_worker.sampling.device_filters import DeviceFilters
from fairlead_worker.sampling.filters import find_unlikely, top_p_of


def draw_nucleus(scaled: torch.Tensor, samplings: Sequence[Sampling], noise: torch.Tensor, filters: DeviceFilters) -> torch.Tensor:
    """Draw tokens [rows] int64 by top_p, then min_p.

    scaled [rows, vocabulary] float32: logits after temperature, the largest of each row 0. noise [rows] float64 in [0, 1).
    """
    probabilities, top_p = scaled.softmax(1), top_p_of(samplings, scaled.device)
    kept = filters.keep_top_p(probabilities, top_p)
    last = torch.where(kept > 0, probabilities, torch.inf).amin(1, keepdim=True)
    likelier = torch.where(probabilities > last, probabilities, 0.0)
    equal = probabilities == last
    sums = reduce_blocks(likelier, torch.sum).double()
    needed = ((top_p - sums.sum(1)) / last[:, 0].double()).ceil()
    unlikely = find_unlikely(scaled, samplings)
    if unlikely is not None:
        likelier.masked_fill_(unlikely, 0.0)
        equal &= ~unlikely
        sums = reduce_blocks(likelier, torch.sum).double()
    counts = reduce_blocks(equal, torch.sum)
    needed_in = (needed[:, None] - (counts.cumsum(1) - counts)).clamp(min=0).minimum(counts)

    def weights(block: torch.Tensor) -> torch.Tensor:
        candidates = take_blocks(equal, block, False)
        is_needed = candidates & (candidates.cumsum(1) <= needed_in.gather(1, block))
        return torch.where(is_needed, last, take_blocks(likelier, block, 0.0)).double()

    return search_blocks(sums + needed_in * last.double(), weights, noise).clamp_(max=scaled.shape[1] - 1)

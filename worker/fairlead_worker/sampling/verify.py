"""Verification of drafts: the model's own choice at each position, and how far a draft says the same."""

from collections.abc import Sequence

import torch

from fairlead_worker.messages import TokenLogprobs
from fairlead_worker.sampling.masks import Masks
from fairlead_worker.sampling.penalties import Histories
from fairlead_worker.sampling.sampler import sample
from fairlead_worker.scheduler.plan import Row


@torch.inference_mode()
def verify(
    logits: torch.Tensor, rows: Sequence[Row], histories: Histories, masks: Masks | None = None
) -> tuple[list[list[int]], list[tuple[TokenLogprobs, ...]]]:
    """logits [positions, vocabulary] of `rows`, all of which sample -> each row's new tokens, and their log-probabilities.

    A position's token is chosen as in a step of its own: from its logits, its noise, and the counts of the tokens before it. While the
    draft says the same, the next position has seen the right tokens and counts; its token ends the row otherwise. One token at least,
    one more than the draft at most.
    """
    requests = [row.request for row in rows for _ in range(len(row.draft) + 1)]
    ahead = [row.draft[:place] for row in rows for place in range(len(row.draft) + 1)]
    chosen, logprobs = sample(logits, requests, histories, ahead, masks)
    tokens: list[list[int]] = []
    told: list[tuple[TokenLogprobs, ...]] = []
    first = 0
    for row in rows:
        count = 1 + count_accepted(row.draft, chosen[first:])
        tokens.append(chosen[first : first + count])
        if logprobs:
            told.append(tuple(each for place in logprobs[first : first + count] for each in place))
        first += len(row.draft) + 1
    return tokens, told


def count_accepted(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """How many leading tokens of a draft were chosen. `chosen` may be longer."""
    for place, token in enumerate(draft):
        if chosen[place] != token:
            return place
    return len(draft)

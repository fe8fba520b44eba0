"""Verification of drafts: the model's own choice at each position, and how much of a draft agrees with it."""

from collections.abc import Sequence

import torch

from fairlead_worker.ipc.messages import TokenLogprobs
from fairlead_worker.sampling.fused import FusedSampler
from fairlead_worker.sampling.masks import Masks
from fairlead_worker.sampling.sampler import sample
from fairlead_worker.scheduler.plan import Row


@torch.inference_mode()
def verify(
    logits: torch.Tensor, rows: Sequence[Row], masks: Masks | None = None, fused: FusedSampler | None = None
) -> tuple[list[list[int]], list[tuple[TokenLogprobs, ...]]]:
    """Return each row's new tokens and their log-probabilities, from logits [positions, vocabulary] of `rows`, all of which sample.

    A position's token is chosen as in a step of its own: from its logits, its noise, and the counts of the tokens before it. While
    the draft agrees, the next position has seen the right tokens and counts; the first token that differs ends the row. A row gets at
    least one token and at most one more than its draft.
    """
    requests = [row.request for row in rows for _ in range(len(row.draft) + 1)]
    ahead = [row.draft[:place] for row in rows for place in range(len(row.draft) + 1)]
    chosen, logprobs = sample(logits, requests, ahead, masks, fused)
    tokens: list[list[int]] = []
    reported: list[tuple[TokenLogprobs, ...]] = []
    first = 0
    for row in rows:
        count = 1 + count_accepted(row.draft, chosen[first:])
        tokens.append(chosen[first : first + count])
        if logprobs:
            reported.append(tuple(each for place in logprobs[first : first + count] for each in place))
        first += len(row.draft) + 1
    return tokens, reported


def count_accepted(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many leading tokens of a draft were chosen. `chosen` may be longer."""
    for place, token in enumerate(draft):
        if chosen[place] != token:
            return place
    return len(draft)

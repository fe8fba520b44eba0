"""Prompt log-probabilities: each prompt token's, by the model's own distribution after the tokens before it."""

from collections.abc import Callable
from itertools import accumulate

import torch

from fairlead_worker.ipc.messages import TokenLogprobs
from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.scheduler.plan import StepPlan

BLOCK_LOGITS = 1 << 24
"""Most logits held together (64 MiB in float32, 110 positions of a vocabulary of 152,000), for chunks of any length."""

CACHED_LOGITS = 1 << 22
"""Logits that a CPU scores together (16 MiB), so that temporary tensors stay in its cache: 0.19 instead of 0.39 s for 110 positions."""


def positions_to_score(plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token indices in the packed step, the tokens that follow them), both [n] int64, of all rows in order."""
    places: list[int] = []
    targets: list[int] = []
    for row, begin in zip(plan.rows, accumulate((row.count for row in plan.rows), initial=0), strict=False):
        wanted = row.request.to_score(row.start, row.end)
        places += [begin + position - row.start for position in wanted]
        targets += row.request.tokens[wanted.start + 1 : wanted.stop + 1] if wanted else ()
    return torch.tensor(places, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)


def score(
    plan: StepPlan, targets: torch.Tensor, logits_at: Callable[[slice], torch.Tensor], vocabulary: int
) -> list[tuple[TokenLogprobs, ...]]:
    """Return the prompt log-probabilities of each row of `plan`.

    `logits_at`: a slice of the places of `positions_to_score` -> [n, vocabulary].
    """
    rows = [(row.request.to_score(row.start, row.end), row.request.sampling.prompt_logprobs or 0) for row in plan.rows]
    most = max(top for wanted, top in rows if wanted)
    block = max(1, BLOCK_LOGITS // vocabulary)
    scored: list[TokenLogprobs] = []
    for begin in range(0, len(targets), block):
        some = slice(begin, min(begin + block, len(targets)))
        logits = logits_at(some)
        size = max(1, CACHED_LOGITS // vocabulary) if logits.device.type == "cpu" else block
        for part, tokens in zip(torch.split(logits, size), torch.split(targets[some], size), strict=True):
            scored += _score_block(part, tokens, most)
    answer: list[tuple[TokenLogprobs, ...]] = []
    each = iter(scored)
    for wanted, top in rows:
        answer.append(tuple(_cut(next(each), top) for _ in wanted))
    return answer


def _score_block(logits: torch.Tensor, targets: torch.Tensor, most: int) -> list[TokenLogprobs]:
    """Return the `most` likeliest tokens beside the target of each position: logits [n, vocabulary], targets [n]."""
    logits = logits.float()
    norm = logits.logsumexp(1, keepdim=True)
    chosen = logits.gather(1, to_device(targets, logits.device)[:, None])
    ranks = (logits > chosen).sum(1) + 1
    top, ids = torch.topk(logits, min(most, logits.shape[1]))
    return [
        TokenLogprobs(value, tuple(row_ids), tuple(row_top), rank)
        for value, row_ids, row_top, rank in zip(
            (chosen - norm)[:, 0].tolist(), ids.tolist(), (top - norm).tolist(), ranks.tolist(), strict=True
        )
    ]


def _cut(scores: TokenLogprobs, top: int) -> TokenLogprobs:
    if top == len(scores.top_ids):
        return scores
    return TokenLogprobs(scores.chosen, scores.top_ids[:top], scores.top_logprobs[:top], scores.rank)

"""top_k, top_p and min_p on rows of logits, in the order that transformers' logits warpers apply them."""

from collections.abc import Sequence

import torch

from fairlead_worker.messages import Sampling

NARROW = 64
"""Rows with 0 < top_k <= NARROW look at their NARROW largest logits only; others sort the whole vocabulary (many times slower).
The width depends on the row alone, so that a row's result does not depend on the others'."""


def filter_logits(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """logits [rows, vocabulary] after temperature -> the same with dropped tokens at -inf. The most likely token always stays."""
    vocabulary = logits.shape[1]
    narrow = [i for i, s in enumerate(samplings) if 0 < s.top_k <= NARROW]
    wide = [i for i, s in enumerate(samplings) if not 0 < s.top_k <= NARROW and (0 < s.top_k < vocabulary or s.top_p < 1.0)]
    for rows, width in ((narrow, min(NARROW, vocabulary)), (wide, vocabulary)):
        if rows:
            logits = logits.index_copy(0, torch.tensor(rows, device=logits.device), _top(logits[rows], [samplings[i] for i in rows], width))
    if any(s.min_p > 0 for s in samplings):
        floor = torch.tensor([s.min_p for s in samplings], device=logits.device).log()
        logits = logits.masked_fill(logits < (logits.amax(1) + floor)[:, None], float("-inf"))
    return logits


def _top(logits: torch.Tensor, samplings: Sequence[Sampling], width: int) -> torch.Tensor:
    """Keep each row's top_k largest, then the fewest of these that reach top_p of their probability."""
    device, vocabulary = logits.device, logits.shape[1]
    ordered, tokens = torch.topk(logits, width) if width < vocabulary else torch.sort(logits, dim=1, descending=True, stable=True)
    top_k = torch.tensor([min(s.top_k, vocabulary) if s.top_k > 0 else vocabulary for s in samplings], device=device)
    ordered = ordered.masked_fill(torch.arange(width, device=device) >= top_k[:, None], float("-inf"))
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)
    probabilities = ordered.softmax(1, dtype=torch.float64)
    before = probabilities.cumsum(1) - probabilities
    dropped = (before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    dropped[:, 0] = False
    ordered = ordered.masked_fill(dropped, float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter_(1, tokens, ordered)

"""top_k, top_p and min_p on rows of logits, in the order of transformers' logits warpers.

A filter nearly always leaves a few tokens of the vocabulary, so only a row's largest logits are sorted: 64 of them if top_k
guarantees that no more can stay, else 1,024. A row whose top_p needs more than these is sorted whole. The choice depends on the row
alone, so that its result does not depend on the other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.kernels.transfer import to_device

NARROW, WIDE = 64, 1024
"""Number of largest logits to sort, for rows with top_k up to NARROW and for others. Finding 1,024 takes a tenth of a full sort."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Rows by how much of the vocabulary must be sorted."""

    narrow: list[int]
    wide: list[int]
    sorted: list[int]
    """top_k is more than WIDE, so a full sort is certain."""
    whole: list[int]
    """No top_k and no top_p."""


def widths(samplings: Sequence[Sampling], vocabulary: int) -> Widths:
    """Sort rows into widths."""
    rows = Widths([], [], [], [])
    for i, s in enumerate(samplings):
        if 0 < s.top_k <= NARROW:
            rows.narrow.append(i)
        elif WIDE < s.top_k < vocabulary:
            rows.sorted.append(i)
        elif 0 < s.top_k < vocabulary or s.top_p < 1.0:
            rows.wide.append(i)
        else:
            rows.whole.append(i)
    return rows


def keep_among(scaled: torch.Tensor, samplings: Sequence[Sampling], width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the `width` largest logits of each row, with dropped ones at -inf.

    scaled [rows, vocabulary]: logits after temperature, the largest of each row 0. Returns (logits [rows, width], tokens [rows,
    width], whether the width suffices [rows]).
    """
    vocabulary, device = scaled.shape[1], scaled.device
    width = min(width, vocabulary)
    ordered, tokens = torch.topk(scaled, width)
    kept = [s.top_k if 0 < s.top_k < vocabulary else vocabulary for s in samplings]
    top_k = to_device(kept, device)
    ordered = ordered.masked_fill(torch.arange(width, device=device) >= top_k[:, None], float("-inf"))
    # Probabilities among the tokens that top_k leaves; if it leaves all, in the whole vocabulary.
    probabilities = ordered.softmax(1, dtype=torch.float64)
    unlimited = top_k > width
    if max(kept) > width:
        probabilities = torch.where(unlimited[:, None], scaled.softmax(1).gather(1, tokens).double(), probabilities)
    top_p = top_p_of(samplings, device)
    enough = ~unlimited | (probabilities.sum(1) >= top_p)
    return _finish(ordered, probabilities, top_p, samplings), tokens, enough


def keep_sorted(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return scaled [rows, vocabulary] with dropped tokens at -inf, by a full sort."""
    vocabulary, device = scaled.shape[1], scaled.device
    ordered, tokens = torch.sort(scaled, dim=1, descending=True, stable=True)
    top_k = to_device([s.top_k if 0 < s.top_k < vocabulary else vocabulary for s in samplings], device)
    ordered = ordered.masked_fill(torch.arange(vocabulary, device=device) >= top_k[:, None], float("-inf"))
    ordered = _finish(ordered, ordered.softmax(1, dtype=torch.float64), top_p_of(samplings, device), samplings)
    return torch.empty_like(scaled).scatter_(1, tokens, ordered)


def drop_unlikely(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Apply min_p in place: tokens below that share of the largest probability become -inf. A row's largest logit is 0, so it stays."""
    if not any(s.min_p > 0 for s in samplings):
        return scaled
    # The logarithm is computed on the host: a device's result may differ in the last bit, and change the choice.
    floor = to_device(torch.tensor([s.min_p for s in samplings]).log(), scaled.device)
    return scaled.masked_fill_(scaled < floor[:, None], float("-inf"))


def _finish(ordered: torch.Tensor, probabilities: torch.Tensor, top_p: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Keep the fewest tokens that reach top_p, always the first, then apply min_p. ordered [rows, width] is descending."""
    before = probabilities.cumsum(1) - probabilities
    dropped = (before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    dropped[:, 0] = False
    return drop_unlikely(ordered.masked_fill(dropped, float("-inf")), samplings)


def top_p_of(samplings: Sequence[Sampling], device: torch.device) -> torch.Tensor:
    """Return [rows] float64."""
    return to_device([s.top_p for s in samplings], device, torch.float64)

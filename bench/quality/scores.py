"""What a model says about a text, and how far that is from what the same model says in float32."""

from dataclasses import dataclass

import torch
from torch.nn import functional

BLOCK_LOGITS = 1 << 24
"""Most logits that are worked on together (64 MiB in float32)."""


@dataclass(frozen=True)
class Scores:
    """One entry for each token of the text that has another before it, prompt after prompt."""

    logprobs: torch.Tensor
    """[n] float32, of the text's own tokens."""
    likeliest: torch.Tensor
    """[n] int64, the tokens that greedy decoding would choose."""

    @property
    def nll(self) -> float:
        """Return the mean negative log-likelihood, in nats per token."""
        return -self.logprobs.double().mean().item()

    def distance(self, reference: "Scores") -> float:
        """Return the mean absolute difference of the tokens' log-probabilities, in nats."""
        return (self.logprobs - reference.logprobs).abs().double().mean().item()

    def agreement(self, reference: "Scores") -> float:
        """Return the share of positions whose likeliest token is the reference's."""
        return (self.likeliest == reference.likeliest).double().mean().item()


class Distributions:
    """The reference's distribution at each position: [n, vocabulary], filled and read block by block in the order of the text."""

    def __init__(self, positions: int, vocabulary: int) -> None:
        self._logprobs = torch.empty(positions, vocabulary)
        self._filled = 0

    def fill(self, logits: torch.Tensor) -> None:
        """Take the logits [k, vocabulary] of the next positions."""
        torch.log_softmax(logits.float(), -1, out=self._logprobs[self._filled : self._filled + len(logits)])
        self._filled += len(logits)

    def compare(self) -> "Divergence":
        return Divergence(self._logprobs)


class Divergence:
    """The Kullback-Leibler divergence of a model from the reference, summed block by block as the model computes its logits."""

    def __init__(self, reference: torch.Tensor) -> None:
        self._reference, self._seen, self._total = reference, 0, 0.0

    def add(self, logits: torch.Tensor) -> None:
        """Take the logits [k, vocabulary] of the next positions."""
        wanted = self._reference[self._seen : self._seen + len(logits)]
        self._total += functional.kl_div(logits.float().log_softmax(-1), wanted, reduction="sum", log_target=True).item()
        self._seen += len(logits)

    @property
    def mean(self) -> float:
        """Return the mean over all positions, in nats. Rounding can make that of equal models slightly negative: then it is 0."""
        assert self._seen == len(self._reference), f"{self._seen} of {len(self._reference)} positions were compared"
        return max(self._total / self._seen, 0.0)

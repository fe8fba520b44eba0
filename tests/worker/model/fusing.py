"""Fusing of a model that no loader has read."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from fairlead_worker.model.acceptance import distances, find_refusal
from fairlead_worker.model.exact import widened
from fairlead_worker.model.fuse import fuse_projections
from fairlead_worker.model.fused.trial import trial
from fairlead_worker.model.probe import probe_layers
from fairlead_worker.model.trial_text import Reference, TrialText

TEXT = TrialText.random(64)


def stack_projections(model: PreTrainedModel) -> int:
    """Return the number of stacks, as `fuse_projections`."""
    layers = probe_layers(model)
    return fuse_projections(model, layers, Reference.compute(model, layers, TEXT))


def trial_exactly(model: PreTrainedModel, limit: int) -> list[torch.Tensor]:
    """Return `trial` of `model` in float32."""
    with widened(model):
        return trial(model, limit, TEXT)


def farthest(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Return the largest distance of a row, relative to its size."""
    return max(distances(one, other).max().item() for one, other in zip(got, want, strict=True))


def refusals(after: Sequence[torch.Tensor], before: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> list[str]:
    return [refusal for numbers in zip(after, before, exact, strict=True) if (refusal := find_refusal(*numbers))]

"""Models that no loader has read: our own of the families that have one, and their fusing."""

from collections.abc import Sequence
from typing import Any

import torch
from tests.models import LENGTH, build_model
from transformers import PreTrainedModel

from fairlead_worker.kernels.base import LayerSpec
from fairlead_worker.model.acceptance import distances, find_refusal
from fairlead_worker.model.decoder import Decoder
from fairlead_worker.model.exact import widened
from fairlead_worker.model.families.registry import model_class
from fairlead_worker.model.probe import probe_layers
from fairlead_worker.model.trial import trial
from fairlead_worker.model.trial_text import TrialText

TEXT = TrialText.random(64)


def own_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Return `build_model` as our own decoder; as it is, if the family has none."""
    return as_own(build_model(family, **overrides)).to(dtype)


def as_own(theirs: PreTrainedModel, limit: int = LENGTH) -> Any:
    family = model_class(theirs.config)
    if not issubclass(family, Decoder):
        return theirs
    model = family(theirs.config)
    names = {model.definition.rename(name): tensor for name, tensor in theirs.state_dict().items()}
    turned = {name for name, tensor in names.items() if model.definition.transposed and "layers." in name and tensor.dim() == 2}
    model.load_state_dict(
        {name: tensor.T if turned and "layers." in name and tensor.dim() == 2 else tensor for name, tensor in names.items()}
    )
    model.eval().requires_grad_(False)
    model.prepare(limit)
    return model


def layers_of(model: PreTrainedModel) -> tuple[LayerSpec, ...]:
    return model.specs if isinstance(model, Decoder) else probe_layers(model)


def stack_projections(model: PreTrainedModel) -> int:
    """Return the number of stacks."""
    return model.stack() if isinstance(model, Decoder) else 0


def trial_exactly(model: PreTrainedModel, limit: int) -> list[torch.Tensor]:
    """Return `trial` of `model` in float32."""
    with widened(model):
        return trial(model, limit, TEXT)


def farthest(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Return the largest distance of a row, relative to its size."""
    return max(distances(one, other).max().item() for one, other in zip(got, want, strict=True))


def refusals(after: Sequence[torch.Tensor], before: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> list[str]:
    return [refusal for numbers in zip(after, before, exact, strict=True) if (refusal := find_refusal(*numbers))]

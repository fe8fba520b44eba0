"""Reads the weights of our own models from safetensors, by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairlead_worker.sharding.weights import open_tensors


class MissingWeights(Exception):
    """The checkpoint lacks tensors of the model; the message names the first."""


def read_weights(
    model: nn.Module,
    folder: Path,
    files: Sequence[str],
    names: Mapping[str, tuple[str, ...]],
    prefix: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Replace the parameters of `model`, which are on the meta device, by the checkpoint's.

    names: part of our name -> its name in the checkpoint; several are stacked. prefix: what the checkpoint puts before names of the base
    model if it has a head. Raises MissingWeights, or RuntimeError for a tensor of another shape.
    """
    with open_tensors(folder, files) as stored:
        tensors = {_modern(name.removeprefix(prefix)): tensor for name, tensor in stored.items()}
        wanted = {name: checkpoint_names(name, names) for name, _ in model.named_parameters()}
        if missing := [part for parts in wanted.values() for part in parts if part not in tensors]:
            raise MissingWeights(f"{len(missing)} tensors, first {missing[0]}")
        state = {name: _read(tensors, parts).to(device, dtype) for name, parts in wanted.items()}
    model.load_state_dict(state, assign=True)


def checkpoint_names(name: str, names: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the checkpoint's names of the tensors that make up our parameter `name`."""
    found = [name]
    for ours, theirs in names.items():
        if ours in name:
            found = [each.replace(ours, their) for each in found for their in theirs]
    return found


def _read(tensors: Mapping[str, Any], names: Sequence[str]) -> torch.Tensor:
    return torch.cat([tensors[name][...] for name in names])


def _modern(name: str) -> str:
    """Return the name of a norm's parameter as written since 2019: the first checkpoints of BERT were converted from TensorFlow."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")

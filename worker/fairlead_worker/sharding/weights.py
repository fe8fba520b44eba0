"""A rank's part of a model, read from safetensors: of each tensor only the bytes that the rank keeps.

The reading itself is transformers' own (names of older checkpoints, tied weights, experts stacked, tensor after tensor onto the device).
It is given slices of the files in place of tensors, and a model whose layers have this rank's size.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fairlead_worker.sharding.scales import Groups, Shape, Spread, check_made, find_part
from fairlead_worker.sharding.shards import Cut, Shards


class Part:
    """Some of a tensor in a file, read when it is asked for. Stands in for a safetensors slice."""

    def __init__(self, key: str, tensor: Any, shards: Shards, groups: Groups) -> None:
        self._key, self._tensor, self._shards, self._groups = key, tensor, shards, groups

    def __getitem__(self, index: object) -> Any:
        """All of this rank's part: whoever loads asks for nothing else, and not before the model has been made, which sets the cuts."""
        assert index is Ellipsis, index
        match self.place():
            case None:
                return self._tensor[...]
            case Cut() as cut:
                return self._tensor[cut.of(tuple(self._tensor.get_shape()))]
            case place:
                return place.read(self._tensor)

    def place(self) -> Cut | Spread | Shape | None:
        """Which part that is; None: all. Raises Unshardable where there is none."""
        if (cut := self._shards.cut_of(self._key)) is not None:
            return cut
        layer, _, name = self._key.rpartition(".")
        if name == "weight" or (cut := self._shards.cut_of(f"{layer}.weight")) is None:
            return None
        return find_part(self._key, self.get_shape(), self.get_dtype(), cut, self._groups)

    def get_shape(self) -> list[int]:
        """Of the whole tensor."""
        shape: list[int] = self._tensor.get_shape()
        return shape

    def get_dtype(self) -> str:
        """As the file names it."""
        kind: str = self._tensor.get_dtype()
        return kind


@contextmanager
def parts(folder: Path, files: list[str], shards: Shards, groups: Groups) -> Iterator[dict[str, Part]]:
    """Name -> slice of each tensor in `files`, open for as long as the context is."""
    with ExitStack() as opened:
        found: dict[str, Part] = {}
        for name in files:
            file = opened.enter_context(safe_open(folder / name, framework="pt"))
            for key in file.keys():  # noqa: SIM118  # no mapping
                found[key] = Part(key, file.get_slice(key), shards, groups)
        yield found


def part_class(config: PreTrainedConfig, shards: Shards, tensors: Mapping[str, Part], groups: Groups) -> type[PreTrainedModel]:
    """The class that transformers has for `config`, whose instances have layers of this rank's size.

    Making one raises Unshardable where one of `tensors` has no such part: said before anything is read.
    """
    whole: type[PreTrainedModel] = AutoModelForCausalLM._model_mapping[type(config)]

    def __init__(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        whole.__init__(self, config)
        shards.shrink(self)
        for tensor in tensors.values():
            tensor.place()
        for path in shards.summed:
            if isinstance(layer := self.get_submodule(path), nn.Linear):
                check_made(path, layer.in_features, shards.size * layer.in_features, groups)

    return type(whole.__name__, (whole,), {"__init__": __init__, "__module__": whole.__module__})

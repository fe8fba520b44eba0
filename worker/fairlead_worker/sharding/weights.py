"""A rank's part of a model, read from safetensors: only the bytes that the rank keeps of each tensor.

transformers itself reads the files (names of older checkpoints, tied weights, stacked experts, tensor after tensor onto the device).
It gets slices of the files instead of tensors, and a model whose layers have this rank's size.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from fairlead_worker.sharding.scales import MX, Bytes, Groups, Shape, Spread, check_made, find_mx_part, find_part
from fairlead_worker.sharding.shards import Cut, Pieces, Shards

Rename = Callable[[Iterable[str]], Mapping[str, str]]
"""Returns the tensors to take: the name in the file → the name in the model."""


class Part:
    """Part of a tensor in a file, read on access. Replaces a safetensors slice."""

    def __init__(self, key: str, tensor: Any, shards: Shards, groups: Groups) -> None:
        self._key, self._tensor, self._shards, self._groups = key, tensor, shards, groups

    def __getitem__(self, index: object) -> Any:
        """Return all of this rank's part: the loader requests nothing else, and only after the model is made, which sets the cuts."""
        assert index is Ellipsis, index
        match self.place():
            case None:
                return self._tensor[...]
            case Cut() as cut:
                return self._tensor[cut.of(tuple(self._tensor.get_shape()))]
            case place:
                return place.read(self._tensor)

    def place(self) -> Cut | Pieces | Spread | Shape | Bytes | None:
        """Return which part this is; None: all. Raises Unshardable if there is none."""
        if (cut := self._shards.cut_of(self._key)) is not None:
            return cut
        weight, _, name = self._key.rpartition("_")
        if name in MX and isinstance(cut := self._shards.cut_of(weight), Cut):
            return find_mx_part(self._key, cut)
        layer, _, name = self._key.rpartition(".")
        if name == "weight" or (cut := self._shards.cut_of(f"{layer}.weight")) is None:
            return None
        return find_part(self._key, self.get_shape(), self.get_dtype(), cut, self._groups)

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        shape: list[int] = self._tensor.get_shape()
        return shape

    def get_dtype(self) -> str:
        """Return the dtype as the file names it."""
        kind: str = self._tensor.get_dtype()
        return kind


@contextmanager
def open_tensors(folder: Path, files: Iterable[str], rename: Rename | None = None) -> Iterator[dict[str, Any]]:
    """Yield name -> slice of each tensor in `files`, open while the context is. `rename`: chooses and names them."""
    with ExitStack() as opened:
        stored = [opened.enter_context(safe_open(folder / name, framework="pt")) for name in files]
        found = {key: file for file in stored for key in file.keys()}  # noqa: SIM118  # not a mapping
        names = {key: key for key in found} if rename is None else rename(found)
        yield {name: found[key].get_slice(key) for key, name in names.items()}


def divide(model: PreTrainedModel, shards: Shards, tensors: Mapping[str, Part], groups: Groups) -> None:
    """Give `model`, on the meta device, layers of this rank's size. Raises Unshardable if one of `tensors` has no such part."""
    shards.shrink(model)
    for tensor in tensors.values():
        tensor.place()
    for path in shards.summed:
        if isinstance(layer := model.get_submodule(path), nn.Linear):
            check_made(path, layer.in_features, shards.size * layer.in_features, groups)

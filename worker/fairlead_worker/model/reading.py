"""Streams a checkpoint's tensors into a model: from the mapped files onto the device, one after the other.

transformers reads ordinary weights (names of older checkpoints, tied weights, stacked experts) from slices that `formats` and
`sharding.weights` give it. A `Format` then makes the layers that it left out.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from fairlead_worker.model.families.registry import find_definition, model_class
from fairlead_worker.model.formats.base import Format, find_pending, widen_weights
from fairlead_worker.model.formats.experts import KeptExperts
from fairlead_worker.sharding.scales import Groups
from fairlead_worker.sharding.shards import Shards, relative
from fairlead_worker.sharding.weights import Part, divide


def read_model(
    folder: Path,
    config: PreTrainedConfig,
    tensors: Mapping[str, Any],
    form: Format | None,
    experts: KeptExperts | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    shards: Shards | None,
    groups: Groups,
    further: dict[str, Any],
    progress: Callable[[int], None],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model of `config`, or the part of it that `shards` say, and what transformers says of the names that it read.

    tensors: name -> slice. further: arguments of `from_pretrained`. progress: takes percent. Raises whatever a family's own code raises.
    """
    family = model_class(config)
    text = config.get_text_config(decoder=True)
    given: dict[str, Any] = {"config": text if family.config_class is type(text) else config}  # as AutoModelForCausalLM does
    given |= {"dtype": dtype, "output_loading_info": True}
    if device.type != "cpu" and find_spec("accelerate"):  # without accelerate, transformers reads to the host first
        given["device_map"] = {"": device}
    given |= further
    if (definition := find_definition(config)) is not None and definition.transposed:
        if form is not None:
            raise ValueError("its matrices are transposed, and quantized")
        tensors = {name: Transposed(tensor) if _is_matrix(name, tensor) else tensor for name, tensor in tensors.items()}
    parts = None if shards is None else {key: Part(key, tensor, shards, groups) for key, tensor in tensors.items()}
    tensors = tensors if parts is None else parts
    state = dict(tensors) if form is None else widen_weights(form, tensors, dtype, device)
    source: Mapping[str, Any] = {"pretrained_model_name_or_path": None, "state_dict": state}
    if hasattr(config, "quantization_config"):  # of torchao: the files say more than the names of tensors
        source = {"pretrained_model_name_or_path": folder, "use_safetensors": True, "local_files_only": True}
    with _Bar(progress).shown() as bar:

        def __init__(self: PreTrainedModel, config: PreTrainedConfig) -> None:
            with no_init_weights():  # of the meta device, where each of them would import torch's compiler
                family.__init__(self, config)
            if shards is not None and parts is not None:
                divide(self, shards, parts, groups)
            if form is not None:
                form.prepare(self)
            left = [] if form is None else [form.layers.get(relative(path), "") for path in find_pending(self)]
            bar.further = len(left)
            if experts is not None:
                experts.prepare(self)
                left += experts.weights
            for name in left:  # transformers would report what has no place
                state.pop(name, None)

        made: Any = type(family.__name__, (family,), {"__init__": __init__, "__module__": family.__module__})
        model, info = made.from_pretrained(**source, **given)
        if "device_map" not in given:
            model = model.to(device)
        if form is not None:
            form.place(model, tensors, dtype, bar.over([*find_pending(model)]))
        if experts is not None:
            experts.place(model, tensors)
    return model.eval().requires_grad_(False), info


class Transposed(NamedTuple):
    """Replaces a safetensors slice of a matrix [inputs, outputs]."""

    tensor: Any

    def __getitem__(self, index: Any) -> torch.Tensor:  # type: ignore[override]  # transformers asks for all of it, a rank for its part
        if index is Ellipsis:
            index = (slice(None),)
        outputs, inputs = (*index, slice(None))[:2]
        return torch.transpose(self.tensor[inputs, outputs], 0, 1).contiguous()

    def get_shape(self) -> list[int]:
        """Return [outputs, inputs]."""
        inputs, outputs = self.tensor.get_shape()
        return [outputs, inputs]

    def get_dtype(self) -> Any:
        """Return the dtype as the file names it."""
        return self.tensor.get_dtype()


def _is_matrix(name: str, tensor: Any) -> bool:
    """Return whether a slice is the matrix of a layer."""
    return "layers." in name and name.endswith(".weight") and len(tensor.get_shape()) == 2


def find_file(folder: Path, files: Collection[str], name: str) -> str:
    """Return which of the files has a tensor of this name, perhaps with another prefix."""
    for file in files:
        with safe_open(folder / file, framework="pt") as stored:
            if relative(name) in map(relative, stored.keys()):
                return file
    return "the checkpoint"


class _Bar:
    """Reports transformers' own progress bar over the weights, then that over the layers that it left out."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress, self._done, self._percent = progress, 0, 0
        self.further = 0
        """Items after transformers' own."""

    @contextmanager
    def shown(self) -> Iterator["_Bar"]:
        """Set transformers' hook inside of this context."""

        def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs.get("desc") == "Loading weights" and args and hasattr(args[0], "__len__"):
                return self.over(args[0], self.further)
            return factory(*args, **{**kwargs, "disable": True})

        previous = transformers_logging.set_tqdm_hook(hook)
        try:
            yield self
        finally:
            transformers_logging.set_tqdm_hook(previous)

    def over(self, items: Collection[Any], further: int = 0) -> Iterator[Any]:
        """Yield the items, and report how many of all these are done."""
        total = self._done + len(items) + further
        for item in items:
            if (percent := 100 * self._done // total) > self._percent:
                self._percent = percent
                self._progress(percent)
            self._done += 1
            yield item

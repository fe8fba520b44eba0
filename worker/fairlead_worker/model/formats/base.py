"""What the loader asks of a format: which tensors make up a weight, and what becomes of them on a device.

A linear layer is a `Pending` while transformers fills the rest of the model; then its format makes it, of this rank's tensors. It may
keep them as they are, or widen them. Other weights (experts, embeddings) are widened when transformers reads them.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fairlead_worker.model.lowbit.linear import LowBitLinear
from fairlead_worker.sharding.scales import Groups
from fairlead_worker.sharding.shards import relative

logger = logging.getLogger(__name__)

Parts = Mapping[str, torch.Tensor]
"""Last part of a name -> tensor of a weight, or this rank's part of it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how a checkpoint will run."""

    dtype: torch.dtype
    capability: tuple[int, int] | None = None
    """Of the GPU; None: a CPU."""
    asked: str = "auto"
    """`--dtype`."""
    quantization: str = "none"
    """`--quantization`."""
    ranks: int = 1


class Pending(nn.Module):
    """A layer whose weight its format makes after transformers has read the rest. It cannot compute."""

    def __init__(self, layer: Any, is_head: bool) -> None:
        """layer: of torch, linear or an embedding."""
        super().__init__()
        self.is_head = is_head
        self.out_features, self.in_features = layer.weight.shape
        self.bias: nn.Parameter | None = getattr(layer, "bias", None)


class Format:
    """A format, with the weights that a checkpoint has in it."""

    method: str
    bits = ""
    computes: torch.dtype | None = None
    """The dtype that kept layers compute in, if there is one alone."""
    keeps = False
    """Whether linear layers stay in few bits. `settle` decides."""
    needed: Mapping[str, Collection[str]] = {}
    """Last part of a tensor's name -> those that its weight must have beside it; "a|b": one of two."""

    def __init__(self, weights: Mapping[str, Mapping[str, str]]) -> None:
        """weights: name of a weight -> its tensors: last part of the name -> name."""
        self.weights = weights
        self.layers = {relative(name.removesuffix(".weight")): name for name in weights}

    def find_missing(self, names: Collection[str]) -> tuple[str, str] | None:
        """Return a tensor of these names, and the name of one that it needs and that is not there; None: there is no such tensor."""
        for layer, parts in group_layers(names).items():
            for part in parts.keys() & self.needed.keys():
                lacking = (each for each in self.needed[part] if not parts.keys() & set(each.split("|")))
                if missing := next(lacking, ""):
                    return parts[part], f"{layer}.{missing.replace('|', f' or {layer}.')}"
        return None

    @property
    def groups(self) -> Groups:
        """Return which outputs and inputs share a scale."""
        return Groups()

    def reason_to_widen(self, target: Target) -> str:
        """Return why linear layers cannot stay in few bits; empty if they can. Says nothing of the device but its capability."""
        return "no product here takes them as they are"

    def find_problem(self, device: torch.device) -> str:
        """Return why `device` does not multiply such layers right; empty if it does."""
        return ""

    def size_problem(self, outputs: int, inputs: int) -> str:
        """Return why no product takes a layer of these sizes, which is widened then; empty if one does."""
        return ""

    def settle(self, target: Target, device: torch.device) -> None:
        """Decide what becomes of the layers, with the reason in the log."""
        reason = self.reason_to_widen(target) or self.find_problem(device)
        self.keeps = not reason
        if reason:
            level = logging.INFO if device.type == "cpu" else logging.WARNING
            logger.log(level, "%s weights%s are widened to 16 bits or more: %s", self.method, self.bits, reason)

    def widen(self, weight: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of the weight called so."""
        raise NotImplementedError

    def layer(self, weight: str, layer: Pending, parts: Parts, dtype: torch.dtype) -> nn.Module:
        """Return a linear layer with the weight called so. Raises ValueError."""
        return plain_linear(self.widen(weight, parts, dtype), layer.bias)

    def prepare(self, model: PreTrainedModel) -> None:
        """Put a `Pending` at each place of a linear layer of this format. `model` is on the meta device. Raises ValueError."""
        head = model.get_output_embeddings()
        for path, module in list(model.named_modules()):
            is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward  # others' weights are widened
            if is_linear and relative(path) in self.layers:
                replace_module(model, path, Pending(module, module is head))

    @torch.no_grad()
    def place(self, model: PreTrainedModel, tensors: Mapping[str, Any], dtype: torch.dtype, pending: Iterable[str]) -> None:
        """Replace the `pending` layers of `model`, in place. tensors: slices of this rank's parts. Raises ValueError."""
        widened = Counter[str]()
        for path in pending:
            layer = model.get_submodule(path)
            assert isinstance(layer, Pending)
            weight = self.layers[relative(path)]
            parts = read_parts(self.weights[weight], tensors, model.device)
            try:
                made = self.layer(weight, layer, parts, dtype)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            replace_module(model, path, made)
            reason = self.size_problem(layer.out_features, layer.in_features) or "the head has no kernel for its bits"
            widened["" if isinstance(made, LowBitLinear) else reason] += 1
        if self.keeps:
            logger.info("%d linear layers stay in few bits", widened.pop("", 0))
            for reason, count in widened.items():
                logger.warning("%d layers are widened to %s: %s", count, str(dtype).removeprefix("torch."), reason)


class Widened:
    """A weight of several tensors that is widened when transformers reads it. Replaces a safetensors slice."""

    def __init__(self, form: Format, weight: str, tensors: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._format, self._weight, self._tensors, self._dtype, self._device = form, weight, tensors, dtype, device

    def __getitem__(self, index: object) -> torch.Tensor:
        parts = read_parts(self._format.weights[self._weight], self._tensors, self._device)
        return self._format.widen(self._weight, parts, self._dtype)


def read_parts(names: Mapping[str, str], tensors: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tensors of these names on `device`."""
    return {part: tensors[name][...].to(device) for part, name in names.items()}


def widen_weights(form: Format, tensors: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return `tensors` with one ordinary weight, widened on access, in place of each weight's tensors."""
    used = {name for parts in form.weights.values() for name in parts.values()}
    wide = {weight: Widened(form, weight, tensors, dtype, device) for weight in form.weights}
    return {name: tensor for name, tensor in tensors.items() if name not in used} | wide


def group_layers(names: Collection[str]) -> dict[str, dict[str, str]]:
    """Return layer -> last part of a name -> name, of tensors."""
    layers: dict[str, dict[str, str]] = {}
    for name in names:
        layer, _, part = name.rpartition(".")
        layers.setdefault(layer, {})[part] = name
    return layers


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Return an ordinary layer of `weight` [outputs, inputs]."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` at `path`."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def find_pending(model: nn.Module) -> Iterator[str]:
    """Yield the path of each `Pending`."""
    return (path for path, module in model.named_modules() if isinstance(module, Pending))


def count_experts(text: Any) -> int:
    """Return how many experts a layer of the model of config `text` has, if it has any."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(text, name, None))), 0)

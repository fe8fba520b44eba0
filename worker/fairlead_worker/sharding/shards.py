"""A rank's part of each weight, as data, from the model's own tensor-parallel plan (transformers' `base_model_tp_plan`).

Column-wise: a linear layer keeps some of its outputs. Row-wise: it keeps some of its inputs, and outputs are summed over the ranks
(Shoeybi et al. 2019, Megatron-LM). Attention projections are cut between heads; if there are more ranks than KV heads, ranks share a
KV head.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

COLUMNS, ROWS, PACKED, EXPERTS = "colwise", "rowwise", "packed_colwise", "moe_tp_experts"
WHOLE = ("replicate", "embedding")
"""Prefixes of styles that keep a tensor whole on every rank. An embedding is only looked up in: dividing it would save memory and cost a
sum."""
HEAD = ("colwise_gather_output", "colwise_rep")
"""Names in different transformers releases: the head's outputs over the vocabulary are gathered."""


class Unshardable(Exception):
    """The model cannot be divided this way; the message says why."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a tensor along `dim`, which counts from the end if negative."""

    dim: int
    begin: int
    end: int
    whole: int = field(default=0, compare=False)
    """Size of the whole dimension, if known."""

    def of(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the index of this part in a tensor of `shape`. Raises Unshardable if the tensor is too small."""
        dim = self.dim % len(shape)
        if shape[dim] < self.end:
            raise Unshardable(f"a weight of {tuple(shape)} has no part {self.begin} to {self.end} along {dim}")
        return (*(slice(None) for _ in range(dim)), slice(self.begin, self.end))


class Divided(NamedTuple):
    """A linear layer that is divided over the ranks."""

    cut: Cut
    """Cut of its weight [out_features, in_features]."""
    sizes: tuple[int, int]
    """(in_features, out_features) of the whole."""


class Shards:
    """The parts of one rank, for modules and for the tensors of a checkpoint."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._cuts: dict[str, Cut] = {}
        self.divided: dict[str, Divided] = {}
        """Divided linear layers, by path. Every rank has the whole of all others, except experts."""
        self.summed: list[str] = []
        """Modules whose outputs are summed over the ranks."""
        self.head = ""
        """The module whose outputs are gathered; empty: every rank computes all of them."""

    def shrink(self, model: PreTrainedModel) -> None:
        """Shrink the layers of `model` (on the meta device, without weights) to this rank's part. Raises Unshardable."""
        plan = _plan(model)
        for path, module in list(model.named_modules()):
            style = _style(plan, path)
            if style is None or style.startswith(WHOLE):
                continue
            if style == EXPERTS:
                self._experts(path, module, plan)
            elif not isinstance(module, nn.Linear):
                raise Unshardable(f"{path} is no plain linear layer (but {type(module).__name__})")
            elif style == COLUMNS:
                self._columns(path, module, *self._outputs(model, path, module))
            elif style == ROWS:
                self._rows(path, module)
            elif style in HEAD and module is model.get_output_embeddings():
                self._vocabulary(model, path, module)
            elif style in HEAD and ".linear_attn." in path:
                continue  # recurrent layers are whole on every rank, as are their states
            else:
                raise Unshardable(f"its plan has {path} as {style}, which is not supported")
        if not self.summed:
            raise Unshardable("its plan divides none of its layers")
        if not self.divided.keys() - {self.head}:
            raise Unshardable("its plan divides its experts alone")

    def cut_of(self, key: str) -> Cut | None:
        """Return the cut of a checkpoint's tensor, ignoring name prefixes; None: every rank has the whole tensor."""
        name = re.sub(r"\.experts\.\d+\.", ".experts.*.", key)
        while name:
            if (cut := self._cuts.get(name)) is not None:
                return cut
            name = name.partition(".")[2]
        return None

    def _columns(self, path: str, module: nn.Linear, begin: int, end: int) -> None:
        self._keep(path, module, Cut(0, begin, end), bias=Cut(0, begin, end))
        module.out_features = end - begin

    def _rows(self, path: str, module: nn.Linear) -> None:
        begin, end = self._even(module.in_features, f"the {module.in_features} inputs of {path}")
        self._keep(path, module, Cut(1, begin, end))
        module.in_features = end - begin
        self.summed.append(path)

    def _vocabulary(self, model: PreTrainedModel, path: str, module: nn.Linear) -> None:
        if module.out_features % self.size:
            return
        self.head = path
        # a tied head is a view of the embedding, made after the load
        if not model.config.get_text_config(decoder=True).tie_word_embeddings:
            self._columns(path, module, *self._even(module.out_features, path))

    def _experts(self, path: str, module: nn.Module, plan: Mapping[str, str]) -> None:
        """Divide all experts of a layer, stored in two parameters: [experts, 2 * inner, width] (gate over up) and [experts, width,
        inner].
        """
        styles = {name: _style(plan, f"{path}.{name}") for name, _ in module.named_parameters(recurse=False)}
        if styles != {"gate_up_proj": PACKED, "down_proj": ROWS}:
            raise Unshardable(f"the experts {path} are not of gate_up_proj and down_proj alone")
        down, gate_up = module.down_proj, module.gate_up_proj
        assert isinstance(down, nn.Parameter) and isinstance(gate_up, nn.Parameter)
        experts, width, inner = down.shape
        if gate_up.shape != (experts, 2 * inner, width):
            raise Unshardable(f"the experts {path} are laid out as {tuple(gate_up.shape)} and {tuple(down.shape)}")
        begin, end = self._even(inner, f"the {inner} inner values of {path}")
        module.gate_up_proj = _empty(gate_up, experts, 2 * (end - begin), width)
        module.down_proj = _empty(down, experts, width, end - begin)
        # Checkpoints store each expert's own matrices, Mixtral's under other names. One tensor of all experts is gate over up, which no
        # single cut fits.
        layer = _relative(path).removesuffix(".mlp.experts")
        for experts_of in (f"{layer}.mlp.experts", f"{layer}.block_sparse_moe.experts"):
            for dim, names in enumerate((("w1", "w3", "gate_proj", "up_proj"), ("w2", "down_proj"))):
                self._cuts |= {f"{experts_of}.*.{name}.weight": Cut(dim, begin, end, inner) for name in names}
        self.summed.append(path)

    def _keep(self, path: str, module: nn.Linear, weight: Cut, bias: Cut | None = None) -> None:
        shape, sizes = list(module.weight.shape), (module.in_features, module.out_features)
        self._cuts[_relative(f"{path}.weight")] = replace(weight, whole=shape[weight.dim])
        self.divided[path] = Divided(weight, sizes)
        shape[weight.dim] = weight.end - weight.begin
        module.weight = _empty(module.weight, *shape)
        if module.bias is not None and bias is not None:
            module.bias = _empty(module.bias, bias.end - bias.begin)
            self._cuts[_relative(f"{path}.bias")] = bias

    def _outputs(self, model: PreTrainedModel, path: str, module: nn.Linear) -> tuple[int, int]:
        unit = self._unit_of(model.get_submodule(_parent(path)), path.rpartition(".")[2])
        heads = module.out_features // unit
        if unit > 1 and path.endswith((".k_proj", ".v_proj")) and heads < self.size and self.size % heads == 0:
            head = self.rank * heads // self.size
            return head * unit, (head + 1) * unit
        return self._even(module.out_features, f"the {heads} heads of {path}" if unit > 1 else f"the {heads} outputs of {path}", unit)

    @staticmethod
    def _unit_of(parent: nn.Module, name: str) -> int:
        """Return the number of outputs of a layer that stay together: a head's. `units` of its parent has them by name, if they differ."""
        units: Any = getattr(parent, "units", {})
        head = units.get(name) or getattr(parent, "head_dim", 1)
        return head if isinstance(head, int) else 1

    def _even(self, count: int, what: str, unit: int = 1) -> tuple[int, int]:
        if count // unit % self.size:
            raise Unshardable(f"{what} cannot be divided by {self.size}")
        each = count // self.size
        return self.rank * each, (self.rank + 1) * each


def _plan(model: PreTrainedModel) -> dict[str, str]:
    body = getattr(model.config.get_text_config(decoder=True), "base_model_tp_plan", None)
    if not body:
        raise Unshardable(f"transformers has no tensor-parallel plan for {type(model).__name__}")
    return {**body, **(model._tp_plan or {})}


def _style(plan: Mapping[str, str], path: str) -> str | None:
    """Return the style of a path. Plans name modules relative to the body's root, with * for a layer's number."""
    for pattern, style in plan.items():
        if re.search(r"(?:^|\.)" + re.escape(pattern).replace(r"\*", r"\d+") + "$", path):
            return style
    return None


def _relative(key: str) -> str:
    """Return the key from the list of layers on: checkpoints and modules differ in the prefix."""
    return key[key.index("layers.") :] if "layers." in key else key


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _empty(like: torch.Tensor, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=like.dtype, device=like.device), requires_grad=False)

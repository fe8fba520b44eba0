"""A rank's part of each weight, as data.

Column-wise: a linear layer keeps some of its outputs. Row-wise: it keeps some of its inputs, and outputs are summed over the ranks
(Shoeybi et al. 2019, Megatron-LM). Attention projections are cut between heads; if there are more ranks than KV heads, ranks share a
KV head. Layers of our own have `divide`, which says what a rank keeps (`Ranks`). A model that has none of them is divided by transformers'
tensor-parallel plan (`base_model_tp_plan`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

COLUMNS, ROWS, EXPERTS = "colwise", "rowwise", "moe_tp_experts"
WHOLE = ("replicate", "embedding")
"""Prefixes of styles that keep a tensor whole on every rank. An embedding is only looked up in: dividing it would save memory and cost a
sum."""
IN_LIST = re.compile(r"[^.]+\.\d+(?![^.]).*")
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

    @property
    def parts(self) -> "tuple[Cut, ...]":
        return (self,)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A rank's part of a tensor with several sections along a dimension: a cut of each, side by side."""

    parts: tuple[Cut, ...]

    @property
    def dim(self) -> int:
        return self.parts[0].dim

    def read(self, tensor: Any) -> torch.Tensor:
        """Return this part of a safetensors slice."""
        return torch.cat([tensor[part.of(tuple(tensor.get_shape()))] for part in self.parts], self.dim)


AnyCut = Cut | Pieces


class Ranks(NamedTuple):
    """One of `size` ranks, for layers that say which part of them it keeps."""

    rank: int
    size: int

    def share(self, count: int, what: str) -> int:
        """Return each rank's share of so many. Raises Unshardable if they cannot be divided."""
        if count % self.size:
            raise Unshardable(f"its {count} {what} cannot be divided by {self.size}")
        return count // self.size

    def span(self, heads: int, what: str) -> tuple[int, int]:
        """Return this rank's share of so many heads, from the first to the one after the last; of fewer heads than ranks, the one that it
        shares with others. Raises Unshardable.
        """
        if heads < self.size and self.size % heads == 0:
            head = self.rank * heads // self.size
            return head, head + 1
        each = self.share(heads, what)
        return self.rank * each, (self.rank + 1) * each

    def cut(self, *sections: int, dim: int = 0) -> AnyCut:
        """Return this rank's part of sections of these sizes side by side, each divided evenly."""
        shares = [size // self.size for size in sections]
        return cut_spans(sections, [(self.rank * each, (self.rank + 1) * each) for each in shares], dim)


def cut_spans(sections: Iterable[int], spans: Iterable[tuple[int, int]], dim: int = 0) -> AnyCut:
    """Return the part that has of each section its span (begin, end)."""
    *starts, whole = accumulate(sections, initial=0)
    parts = tuple(Cut(dim, start + begin, start + end, whole) for start, (begin, end) in zip(starts, spans, strict=True))
    return parts[0] if len(parts) == 1 else Pieces(parts)


class Divided(NamedTuple):
    """A linear layer that is divided over the ranks."""

    cut: AnyCut
    """Cut of its weight [out_features, in_features]."""
    sizes: tuple[int, int]
    """(in_features, out_features) of the whole."""


class Elsewhere(nn.Module):
    """What only the first rank adds to a sum: LongCat-Flash's experts without weights."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(states)


class Shards:
    """The parts of one rank, for modules and for the tensors of a checkpoint."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._cuts: dict[str, AnyCut] = {}
        self._renamings: list[WeightRenaming] = []
        """From names in a checkpoint to the model's own."""
        self.divided: dict[str, Divided] = {}
        """Divided linear layers, by path. Every rank has the whole of all others, except experts."""
        self.summed: list[str] = []
        """Modules whose outputs are summed over the ranks."""
        self.head = ""
        """The module whose outputs are gathered; empty: every rank computes all of them."""

    def shrink(self, model: PreTrainedModel) -> None:
        """Shrink the layers of `model` (on the meta device, without weights) to this rank's part. Raises Unshardable."""
        self._renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
        if any(hasattr(module, "divide") for module in model.modules()):
            self._shrink_own(model)
        else:
            self._shrink_by_plan(model, _plan(model))
        if not self.summed:
            raise Unshardable("its plan divides none of its layers")

    def _shrink_own(self, model: PreTrainedModel) -> None:
        """Divide the layers that have `divide`, experts, and the head."""
        for path, module in list(model.named_modules()):
            if hasattr(module, "divide"):
                self._layer(path, module)
            elif isinstance(getattr(module, "down_proj", None), nn.Parameter):
                self._experts(path, module)
            elif module is model.get_output_embeddings():
                assert isinstance(module, nn.Linear)
                self._vocabulary(model, path, module)

    def _shrink_by_plan(self, model: PreTrainedModel, plan: Mapping[str, str]) -> None:
        for path, module in list(model.named_modules()):
            style = _style(plan, path)
            if style is None or style.startswith(WHOLE):
                continue
            if style == EXPERTS:
                self._experts(path, module)
            elif not isinstance(module, nn.Linear):
                raise Unshardable(f"{path} is no plain linear layer (but {type(module).__name__})")
            elif style == COLUMNS:
                self._columns(path, module, *self._outputs(model, path, module))
            elif style == ROWS:
                self._rows(path, module)
            elif style in HEAD and module is model.get_output_embeddings():
                self._vocabulary(model, path, module)
            else:
                raise Unshardable(f"its plan has {path} as {style}, which is not supported")

    def cut_of(self, key: str) -> AnyCut | None:
        """Return the cut of a checkpoint's tensor, ignoring name prefixes; None: every rank has the whole tensor.

        Checkpoints of Mixtral and Kimi have the older name of `mlp`.
        """
        for renaming in self._renamings:
            key, _ = renaming.rename_source_key(key)
        stored = re.sub(r"\.experts\.\d+\.", ".experts.*.", key)
        for name in (stored, stored.replace(".block_sparse_moe.", ".mlp.")):
            while name:
                if (cut := self._cuts.get(name)) is not None:
                    return cut
                name = name.partition(".")[2]
        return None

    def _columns(self, path: str, module: nn.Linear, begin: int, end: int) -> None:
        self._linear(path, module, Cut(0, begin, end, module.out_features))

    def _rows(self, path: str, module: nn.Linear) -> None:
        begin, end = self._even(module.in_features, f"the {module.in_features} inputs of {path}")
        self._linear(path, module, Cut(1, begin, end, module.in_features))

    def _layer(self, path: str, module: Any) -> None:
        """Divide a layer of our own as it says: name of a linear layer, of another part or of a parameter -> its cut. Names that the layer
        lacks are those of a checkpoint's tensors.
        """
        try:
            cuts: Mapping[str, AnyCut] = module.divide(Ranks(self.rank, self.size))
        except Unshardable as error:
            raise Unshardable(f"{path}: {error}") from None
        for name, cut in cuts.items():
            match _find(module, name):
                case nn.Linear() as part:
                    self._linear(f"{path}.{name}", part, cut)
                case nn.Module() as part:
                    for each, _ in list(part.named_parameters()):
                        self._parameter(f"{path}.{name}.{each}", part, each, cut)
                case nn.Parameter():
                    owner, _, leaf = name.rpartition(".")
                    self._parameter(f"{path}.{name}", module.get_submodule(owner), leaf, cut)
                case None:
                    self._set(relative(f"{path}.{name}"), cut)

    def _vocabulary(self, model: PreTrainedModel, path: str, module: nn.Linear) -> None:
        if module.out_features % self.size:
            return
        self.head = path
        # a tied head is a view of the embedding, made after the load
        if not model.config.get_text_config(decoder=True).tie_word_embeddings:
            self._columns(path, module, *self._even(module.out_features, path))

    def _experts(self, path: str, module: Any) -> None:
        """Divide all experts of a layer, stored in two parameters: [experts, 2 * inner, width] (gate over up; or [experts, inner, width]
        of experts without a gate) and [experts, width, inner].
        """
        if getattr(module, "is_transposed", False):
            self._transposed_experts(path, module)
            return
        name, *others = [name for name, _ in module.named_parameters(recurse=False) if name != "down_proj"]
        if others or name not in ("gate_up_proj", "up_proj"):
            raise Unshardable(f"the experts {path} are not of gate_up_proj and down_proj alone")
        sections = 2 if name == "gate_up_proj" else 1
        down, up = module.down_proj, module.get_parameter(name)
        assert isinstance(down, nn.Parameter)
        experts, width, inner = down.shape
        if up.shape[1:] != (sections * inner, width):
            raise Unshardable(f"the experts {path} are laid out as {tuple(up.shape)} and {tuple(down.shape)}")
        begin, end = self._even(inner, f"the {inner} inner values of {path}")
        setattr(module, name, _empty(up, len(up), sections * (end - begin), width))
        module.down_proj = _empty(down, experts, width, end - begin)
        # Checkpoints store each expert's own matrices, Mixtral's under other names, or one tensor of all: Granite's, Gemma 4's.
        block = relative(path).removesuffix(".experts")
        stacked = Ranks(self.rank, self.size).cut(*[inner] * sections, dim=1)
        for upper, lower in (("input_linear.weight", "output_linear.weight"), (f"experts.{name}", "experts.down_proj")):
            self._set(f"{block}.{upper}", stacked)
            self._set(f"{block}.{lower}", Cut(2, begin, end, inner))
        for dim, names in enumerate((("w1", "w3", "gate_proj", "up_proj"), ("w2", "down_proj"))):
            for each in names:
                self._set(f"{block}.experts.*.{each}.weight", Cut(dim, begin, end, inner))
        if self.rank and hasattr(module, "identity_expert"):
            module.identity_expert = Elsewhere()
        self.summed.append(path)

    def _transposed_experts(self, path: str, module: Any) -> None:
        """Divide experts in parameters [experts, width, 2 * inner] and [experts, inner, width], as checkpoints of Llama 4 store them.

        gpt-oss's have biases too, and each up beside its gate.
        """
        experts, inner, width = module.down_proj.shape
        if module.gate_up_proj.shape != (experts, width, 2 * inner):
            raise Unshardable(f"the experts {path} are laid out as {tuple(module.gate_up_proj.shape)} and {tuple(module.down_proj.shape)}")
        self._even(inner, f"the {inner} inner values of {path}")
        ranks, sections = Ranks(self.rank, self.size), (inner, inner) if getattr(module, "is_concatenated", True) else (2 * inner,)
        self._parameter(f"{path}.gate_up_proj", module, "gate_up_proj", ranks.cut(*sections, dim=2))
        if getattr(module, "gate_up_proj_bias", None) is not None:
            self._parameter(f"{path}.gate_up_proj_bias", module, "gate_up_proj_bias", ranks.cut(*sections, dim=1))
        self._parameter(f"{path}.down_proj", module, "down_proj", ranks.cut(inner, dim=1))
        self.summed.append(path)

    def _linear(self, path: str, module: nn.Linear, cut: AnyCut) -> None:
        """Keep some outputs of a layer, or some inputs: then its outputs are summed, and its bias is whole."""
        self.divided[path] = Divided(cut, (module.in_features, module.out_features))
        self._parameter(f"{path}.weight", module, "weight", cut)
        if cut.dim == 1:
            self.summed.append(path)
        elif module.bias is not None:
            self._parameter(f"{path}.bias", module, "bias", cut)
        module.out_features, module.in_features = module.weight.shape

    def _parameter(self, path: str, owner: nn.Module, name: str, cut: AnyCut) -> None:
        whole = owner.get_parameter(name)
        shape = list(whole.shape)
        shape[cut.dim] = sum(part.end - part.begin for part in cut.parts)
        self._set(f"{relative(_parent(path))}.{name}", cut)
        setattr(owner, name, _empty(whole, *shape))

    def _set(self, name: str, cut: AnyCut) -> None:
        """Remember the cut of a tensor. Raises Unshardable if another layer's tensor has this name and another cut."""
        if self._cuts.setdefault(name, cut) != cut:
            raise Unshardable(f"two of its layers are called {name.rpartition('.')[0]}, and a rank's parts of them differ")

    def _outputs(self, model: PreTrainedModel, path: str, module: nn.Linear) -> tuple[int, int]:
        head: Any = getattr(model.get_submodule(_parent(path)), "head_dim", 1)
        unit = head if isinstance(head, int) else 1
        heads = module.out_features // unit
        if unit > 1 and path.endswith((".k_proj", ".v_proj")) and heads < self.size and self.size % heads == 0:
            head = self.rank * heads // self.size
            return head * unit, (head + 1) * unit
        return self._even(module.out_features, f"the {heads} heads of {path}" if unit > 1 else f"the {heads} outputs of {path}", unit)

    def _even(self, count: int, what: str, unit: int = 1) -> tuple[int, int]:
        if count // unit % self.size:
            raise Unshardable(f"{what} cannot be divided by {self.size}")
        each = count // self.size
        return self.rank * each, (self.rank + 1) * each


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the plan of transformers. Raises Unshardable if there is none."""
    body = getattr(model.config.get_text_config(decoder=True), "base_model_tp_plan", None) or {}
    if not body:
        raise Unshardable(f"transformers has no tensor-parallel plan for {type(model).__name__}")
    return {**body, **(model._tp_plan or {})}


def _style(plan: Mapping[str, str], path: str) -> str | None:
    """Return the style of a path. Plans name modules relative to the body's root, with * for a layer's number."""
    for pattern, style in plan.items():
        if re.search(r"(?:^|\.)" + re.escape(pattern).replace(r"\*", r"\d+") + "$", path):
            return style
    return None


def relative(path: str) -> str:
    """Return the path of a layer from its first list of layers on; of others the name. Checkpoints and modules differ in the prefix."""
    found = IN_LIST.search(path)
    return found[0] if found else path.rpartition(".")[2]


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _find(module: nn.Module, name: str) -> Any:
    """Return the part of a module by its dotted name; None: there is none."""
    try:
        return attrgetter(name)(module)
    except AttributeError:
        return None


def _empty(like: torch.Tensor, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=like.dtype, device=like.device), requires_grad=False)

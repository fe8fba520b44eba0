"""Checkpoints of packed integers (AWQ, GPTQ, and compressed-tensors' pack-quantized): read as they are stored, then kept in 4 bits on a
GPU, or widened layer after layer.

The layouts are those of AutoAWQ (`gemm`), AutoGPTQ (`gptq`, `gptq_v2`) and compressed-tensors. transformers' own modules for AWQ and GPTQ
need a package that is compiled for the device.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.lowbit.int4 import Int4Linear, int4_linear, int4_problem, unsupported

logger = logging.getLogger(__name__)

AWQ, GPTQ, COMPRESSED = "awq", "gptq", "compressed-tensors"
WEIGHTS = {AWQ: "qweight", GPTQ: "qweight", COMPRESSED: "weight_packed"}
ZEROS = {AWQ: "qzeros", GPTQ: "qzeros", COMPRESSED: "weight_zero_point"}
SCALES = {AWQ: "scales", GPTQ: "scales", COMPRESSED: "weight_scale"}
ORDER = "g_idx"
"""The group of each input, in GPTQ."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word of AWQ has each of its 8 outputs, in 4 bits from the lowest on."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the weights of a checkpoint are packed."""

    method: str
    bits: int
    group: int
    """Inputs that share a scale; 0: all of them."""
    zero_offset: int = 0
    """What a stored zero point lacks: 1 in the first version of GPTQ's format."""
    act_order: bool = False
    """Whether groups may have inputs of any place (GPTQ's `desc_act`)."""

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.group) if self.group else 1

    def shape(self, name: str, outputs: int, inputs: int) -> tuple[int, ...]:
        """Return the shape of the tensor `name` beside a weight [outputs, inputs]."""
        each, groups = 32 // self.bits, self.groups(inputs)
        shapes: Mapping[str, tuple[int, ...]] = {
            "weight_packed": (outputs, -(-inputs // each)),
            "weight_scale": (outputs, groups),
            "weight_zero_point": (-(-outputs // each), groups),
            "qweight": (inputs, outputs // each) if self.method == AWQ else (inputs // each, outputs),
            "scales": (groups, outputs),
            "qzeros": (groups, outputs // each),
            ORDER: (inputs,),
        }
        return shapes[name]


def packing_of_config(uri: str, given: Mapping[str, Any]) -> Packing | None:
    """Return the packing of an AWQ or GPTQ checkpoint by its `quantization_config`; None for others. Raises ModelLoadError."""
    method, bits, group = given["quant_method"], given.get("bits", 4), int(given.get("group_size", 128))
    if method not in (AWQ, GPTQ):
        return None
    form = str(given.get("version") or given.get("format") or "gemm").lower() if method == AWQ else given.get("checkpoint_format", "gptq")
    known = {AWQ: ("gemm",), GPTQ: ("gptq", "gptq_v2")}[method]
    widths = {AWQ: (4,), GPTQ: (4, 8)}[method]
    for name, value, supported in (("its format", form, known), ("bits", bits, widths)):
        if value not in supported:
            raise ModelLoadError(
                uri, f"its weights are quantized ({method}) with {name} {value!r}; supported: {', '.join(map(str, supported))}"
            )
    if group == 0 or group < -1:
        raise ModelLoadError(uri, f"its weights are quantized ({method}) with group_size {group}; use -1 or a positive number")
    if any((given.get("dynamic") or {}).values()):
        raise ModelLoadError(uri, "its quantization_config gives some layers settings of their own (dynamic), which is not supported")
    return Packing(method, bits, max(group, 0), int(form == "gptq"), bool(given.get("desc_act")))


def packing_of_schemes(form: str | None, schemes: Iterable[Any]) -> Packing | None:
    """Return the packing of a compressed-tensors checkpoint with these schemes; None if its layers cannot stay in 4 bits."""
    weights = [scheme.weights for scheme in schemes]
    kinds = {(each.num_bits, each.type, each.strategy, each.group_size) for each in weights}
    if form != "pack-quantized" or len(kinds) != 1 or any(scheme.input_activations or scheme.output_activations for scheme in schemes):
        return None
    bits, kind, strategy, group = kinds.pop()
    if (bits, kind) != (4, "int") or strategy not in ("group", "channel"):
        return None
    return Packing(COMPRESSED, 4, max(group or 0, 0))


def reason_against(packing: Packing, dtype: str) -> str:
    """Return why a checkpoint cannot stay in 4 bits on any GPU; empty if it can. dtype: of `--dtype`."""
    if packing.bits != 4:
        return f"it has {packing.bits} bits, and the kernel is for 4"
    if dtype not in ("auto", "bfloat16"):
        return f"the kernel computes in bfloat16, not in {dtype} (--dtype)"
    return ""


class StoredLinear(nn.Module):
    """The tensors of a linear layer as its file has them. It cannot compute."""

    def __init__(self, packing: Packing, names: Iterable[str], layer: nn.Linear) -> None:
        """names: of the tensors in the file."""
        super().__init__()
        self.packing, self.in_features, self.out_features = packing, layer.in_features, layer.out_features
        for name in names:
            dtype = torch.float32 if name == SCALES[packing.method] else torch.int32
            shape = packing.shape(name, layer.out_features, layer.in_features)
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=layer.weight.device), requires_grad=False))
        self.bias = layer.bias

    def codes(self) -> torch.Tensor:
        """Return [outputs, inputs] uint8."""
        weight = _numbers(self.get_parameter(WEIGHTS[self.packing.method]).detach(), self.packing)
        return weight[:, : self.in_features] if self.packing.method == COMPRESSED else weight.T

    def scale(self) -> torch.Tensor:
        """Return [outputs, groups] float32."""
        scale = self.get_parameter(SCALES[self.packing.method]).detach()
        return scale if self.packing.method == COMPRESSED else scale.T

    def zero(self) -> torch.Tensor:
        """Return the code that stands for zero in each group: [outputs, groups] int32."""
        stored = getattr(self, ZEROS[self.packing.method], None)
        if stored is None:
            return torch.full(self.scale().shape, 1 << self.packing.bits - 1, dtype=torch.int32, device=self.scale().device)
        zeros = _unpacked(stored.detach().T, self.packing.bits)[:, : self.out_features] if self.packing.method == COMPRESSED else None
        zeros = _numbers(stored.detach(), self.packing, outputs=True) if zeros is None else zeros
        return zeros.T.to(torch.int32) + self.packing.zero_offset

    def order(self) -> torch.Tensor | None:
        """Return the inputs in the order of their groups; None if they are in order. Raises ValueError if groups have other sizes."""
        stored = getattr(self, ORDER, None)
        if stored is None or not self.packing.group:
            return None
        groups = stored.detach().long() - stored.detach().min()  # a rank's part begins with any group
        regular = torch.arange(self.in_features, device=groups.device) // self.packing.group
        if torch.equal(groups, regular):
            return None
        order: torch.Tensor = groups.argsort(stable=True)
        if not torch.equal(groups[order], regular):
            raise ValueError(f"its {ORDER} has groups of other sizes than {self.packing.group}")
        return order

    def unsupported(self) -> str:
        """Return why the layer cannot stay in 4 bits; empty if it can."""
        return unsupported(self.out_features, self.in_features, self.packing.groups(self.in_features))

    def kept(self) -> Int4Linear:
        """Return the layer in 4 bits."""
        order = self.order()
        codes = self.codes() if order is None else self.codes()[:, order]
        return int4_linear(codes, self.scale(), self.zero(), self.bias, order)

    def widened(self, dtype: torch.dtype) -> nn.Linear:
        """Return an ordinary layer."""
        codes, order = self.codes(), self.order()
        each = self.packing.group or self.in_features
        scale, zero = (part.repeat_interleave(each, 1)[:, : self.in_features] for part in (self.scale(), self.zero()))
        if order is not None:
            place = order.argsort()
            scale, zero = scale[:, place], zero[:, place]
        with torch.device("meta"):
            layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        layer.weight = nn.Parameter(((codes - zero) * scale).to(dtype), requires_grad=False)
        layer.bias = self.bias
        return layer


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of words [rows, n], from the lowest bits on: [rows, 32 / bits * n] uint8."""
    places = words.contiguous().view(torch.uint8)
    return places if bits == 8 else torch.stack((places & 15, places >> 4), -1).flatten(-2)


def _numbers(words: torch.Tensor, packing: Packing, outputs: bool = False) -> torch.Tensor:
    """Return the numbers of packed words as the file's matrix: [inputs or groups, outputs], for compressed-tensors [outputs, inputs].

    outputs: GPTQ packs zero points of several outputs into a word, and weights of several inputs.
    """
    if packing.method == COMPRESSED:
        return _unpacked(words, packing.bits)
    if packing.method == AWQ:
        return _unpacked(words, packing.bits).view(len(words), -1, 8)[..., list(AWQ_ORDER)].flatten(1)
    return _unpacked(words, packing.bits) if outputs else _unpacked(words.T, packing.bits).T


Names = Mapping[str, frozenset[str]]
"""Quantized layers from the list of layers on (checkpoints and modules differ in the prefix) -> the names of their tensors."""


def stored_names(uri: str, folder: Path, files: Iterable[str], packing: Packing) -> Names:
    """Return the quantized layers of a checkpoint. Raises ModelLoadError."""
    found: dict[str, set[str]] = {}
    wanted = {names[packing.method] for names in (WEIGHTS, SCALES, ZEROS)} | ({ORDER} if packing.method == GPTQ else set())
    for file in files:
        with safe_open(folder / file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  # not a mapping
                layer, _, name = key.rpartition(".")
                if name in wanted:
                    found.setdefault(relative(layer), set()).add(name)
    quantized = {layer: frozenset(names) for layer, names in found.items() if WEIGHTS[packing.method] in names}
    if not quantized:
        raise ModelLoadError(
            uri, f"its config.json says {packing.method}, and no file has a tensor that ends with .{WEIGHTS[packing.method]}"
        )
    return quantized


@dataclass(frozen=True, slots=True)
class Stored:
    """The quantized layers of a checkpoint, and what becomes of them."""

    packing: Packing
    names: Names
    keep: bool
    """Whether they stay in 4 bits on the device."""


def find_stored(uri: str, folder: Path, files: Iterable[str], packing: Packing, dtype: str, device: torch.device) -> Stored | None:
    """Return what to read of a checkpoint; the log says why layers do not stay in 4 bits. dtype: of `--dtype`.

    None: compressed-tensors reads and widens it. Raises ModelLoadError.
    """
    names = stored_names(uri, folder, files, packing)
    reason = reason_to_widen(uri, packing, names, dtype) or int4_problem(device)
    if reason:
        level = logging.INFO if device.type == "cpu" else logging.WARNING
        logger.log(level, "%s weights of %d bits are widened to 16 bits or more: %s", packing.method, packing.bits, reason)
    return None if reason and packing.method == COMPRESSED else Stored(packing, names, not reason)


def reason_to_widen(uri: str, packing: Packing, names: Names, dtype: str) -> str:
    """Return why layers of these `names` cannot stay in 4 bits on any GPU; empty if they can. Raises ModelLoadError for other experts."""
    expert = next((layer for layer in names if ".experts." in layer), "")
    if expert and packing.method != COMPRESSED:
        raise ModelLoadError(
            uri, f"its experts are quantized ({packing.method}: {expert}), which is not supported; use compressed-tensors or float8"
        )
    return "experts have no kernel that reads 4 bits" if expert else reason_against(packing, dtype)


def stored_class(family: type[PreTrainedModel], stored: Stored) -> type[PreTrainedModel]:
    """Return `family` with a `StoredLinear` in place of each quantized layer."""

    def __init__(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        family.__init__(self, config)
        for path, module in list(self.named_modules()):
            if isinstance(module, nn.Linear) and (names := stored.names.get(relative(path))) is not None:
                parent, _, name = path.rpartition(".")
                setattr(self.get_submodule(parent), name, StoredLinear(stored.packing, names, module))

    return type(family.__name__, (family,), {"__init__": __init__, "__module__": family.__module__})


def relative(path: str) -> str:
    """Return the path of a layer from the list of layers on: checkpoints and modules differ in the prefix."""
    return path[path.index("layers.") :] if "layers." in path else path.rpartition(".")[2]


@torch.no_grad()
def take_stored(uri: str, model: PreTrainedModel, dtype: torch.dtype, keep: bool) -> None:
    """Replace every `StoredLinear` of `model`, in place: by a layer in 4 bits if `keep`, and it can be one, else by an ordinary one.

    Raises ModelLoadError.
    """
    reasons, head = Counter[str](), model.get_output_embeddings()
    for path in [path for path, layer in model.named_modules() if isinstance(layer, StoredLinear)]:
        layer = model.get_submodule(path)
        assert isinstance(layer, StoredLinear)
        reason = "the head has no kernel that reads 4 bits" if layer is head else layer.unsupported()
        parent, _, name = path.rpartition(".")
        try:
            setattr(model.get_submodule(parent), name, layer.kept() if keep and not reason else layer.widened(dtype))
        except ValueError as error:
            raise ModelLoadError(uri, f"{path}: {error}") from error
        reasons[reason] += 1
    if keep:
        logger.info("%d linear layers stay in 4 bits", reasons.pop("", 0))
        for reason, count in reasons.items():
            logger.warning("%d layers are widened to %s: %s", count, str(dtype).removeprefix("torch."), reason)

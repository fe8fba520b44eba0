"""Packed integers: checkpoints of AWQ and GPTQ, and the 4-bit layers that they and compressed-tensors' become on a GPU.

The layouts are those of AutoAWQ (`gemm`) and AutoGPTQ (`gptq`, `gptq_v2`). transformers' own modules for them need a package that is
compiled for the device.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.formats.base import Format, Parts, Pending, Target, group_layers, plain_linear
from fairlead_worker.model.lowbit.int4 import CAPABILITY, Int4Linear, int4_linear, int4_problem, unsupported
from fairlead_worker.sharding.scales import Groups

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word of AWQ has each of its 8 outputs, in 4 bits from the lowest on."""
SUPPORTED: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]] = {"awq": (("gemm",), (4,)), "gptq": (("gptq", "gptq_v2"), (4, 8))}
"""Formats and bits of each method."""
NO_EXPERTS = "experts have no kernel that reads 4 bits"


@dataclass(frozen=True, slots=True)
class Integers:
    """A weight of unsigned integers: (code - zero) * scale of a group of inputs."""

    codes: torch.Tensor
    """[outputs, inputs] uint8"""
    scale: torch.Tensor
    """[outputs, groups] float"""
    zero: torch.Tensor
    """[outputs, groups] int32"""
    group: int
    """Inputs of a group."""
    order: torch.Tensor | None = None
    """The inputs in the order of their groups; None: they are in order."""

    def widened(self) -> torch.Tensor:
        """Return [outputs, inputs] float32."""
        inputs = self.codes.shape[1]
        scale, zero = (part.repeat_interleave(self.group, 1)[:, :inputs] for part in (self.scale.float(), self.zero))
        if self.order is not None:
            place = self.order.argsort()
            scale, zero = scale[:, place], zero[:, place]
        return (self.codes - zero) * scale

    def kept(self, bias: torch.Tensor | None) -> Int4Linear:
        """Return a layer in 4 bits."""
        codes = self.codes if self.order is None else self.codes[:, self.order]
        return int4_linear(codes, self.scale.float(), self.zero, bias, self.order)


def reason_against_int4(bits: int, target: Target) -> str:
    """Return why a checkpoint cannot stay in 4 bits; empty if it can."""
    if bits != 4:
        return f"it has {bits} bits, and the kernel is for 4"
    if target.asked not in ("auto", "bfloat16"):
        return f"the kernel computes in bfloat16, not in {target.asked} (--dtype)"
    if target.capability is None:
        return "the kernel is for GPUs"
    if target.capability < CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (target.capability, CAPABILITY))
        return f"the GPU's compute capability is {found}, and the kernel needs {needed}"
    return ""


class PackedIntegers(Format):
    """AWQ and GPTQ: words of several codes, scales in float16, and packed zero points."""

    computes = torch.bfloat16

    def __init__(self, uri: str, config: Any, names: Collection[str]) -> None:
        """Raises ModelLoadError."""
        given = config.quantization_config
        self.method, self.size, group = given["quant_method"], given.get("bits", 4), int(given.get("group_size", 128))
        is_awq = self.method == "awq"
        form = str(given.get("version") or given.get("format") or "gemm").lower() if is_awq else given.get("checkpoint_format", "gptq")
        forms, widths = SUPPORTED[self.method]
        for name, value, supported in (("its format", form, forms), ("bits", self.size, widths)):
            if value not in supported:
                known = ", ".join(map(str, supported))
                raise ModelLoadError(uri, f"its weights are quantized ({self.method}) with {name} {value!r}; supported: {known}")
        if group == 0 or group < -1:
            raise ModelLoadError(uri, f"its weights are quantized ({self.method}) with group_size {group}; use -1 or a positive number")
        if any((given.get("dynamic") or {}).values()):
            raise ModelLoadError(uri, "its quantization_config gives some layers settings of their own (dynamic), which is not supported")
        self.group, self.bits, self.act_order = max(group, 0), f" of {self.size} bits", bool(given.get("desc_act"))
        self.zero_offset = int(form == "gptq")
        """What a stored zero point lacks: 1 in the first version of GPTQ's format."""
        zeros = ["qzeros"] * bool(given.get("zero_point", True) if is_awq else not given.get("sym", True))
        order = ["g_idx"] * (self.act_order and self.group > 0)
        self.needed = {"qweight": ("scales", *zeros, *order), "scales": ("qweight",)}
        found: dict[str, dict[str, str]] = {
            f"{layer}.weight": {name: parts[name] for name in ("qweight", "qzeros", "scales", "g_idx") if name in parts}
            for layer, parts in group_layers(names).items()
            if "qweight" in parts
        }
        if not found:
            raise ModelLoadError(uri, f"its config.json says {self.method}, and no file has a tensor that ends with .qweight")
        super().__init__(found)
        if expert := next((layer for layer in self.layers if ".experts." in layer), ""):
            known = "use compressed-tensors or float8"
            raise ModelLoadError(uri, f"its experts are quantized ({self.method}: {expert}), which is not supported; {known}")

    @property
    def groups(self) -> Groups:
        return Groups(inputs=frozenset({self.group} - {0}), act_order=self.act_order)

    def reason_to_widen(self, target: Target) -> str:
        return reason_against_int4(self.size, target)

    def find_problem(self, device: torch.device) -> str:
        return int4_problem(device)

    def size_problem(self, outputs: int, inputs: int) -> str:
        return unsupported(outputs, inputs, -(-inputs // self.group) if self.group else 1)

    def read(self, parts: Parts) -> Integers:
        """Return the weight of these tensors. Raises ValueError for tensors that do not fit together."""
        words, scale = parts["qweight"], parts["scales"].T
        codes = self._numbers(words) if self.method == "awq" else unpack(words.T, self.size)
        codes = codes.T if self.method == "awq" else codes
        inputs = codes.shape[1]
        group = self.group or inputs
        if scale.shape != (len(codes), -(-inputs // group)):
            raise ValueError(f"scales of {tuple(scale.T.shape)} do not fit {inputs} inputs in groups of {group}, and {len(codes)} outputs")
        zeros = parts.get("qzeros")
        zero = torch.full(scale.shape, 1 << self.size - 1, dtype=torch.int32, device=scale.device)
        if zeros is not None:
            zero = self._numbers(zeros).T.to(torch.int32) + self.zero_offset
        return Integers(codes, scale, zero, group, self._order(parts.get("g_idx"), inputs))

    def widen(self, weight: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        return self.read(parts).widened().to(dtype)

    def layer(self, weight: str, layer: Pending, parts: Parts, dtype: torch.dtype) -> nn.Module:
        if self.keeps and not layer.is_head and not self.size_problem(layer.out_features, layer.in_features):
            return self.read(parts).kept(layer.bias)
        return plain_linear(self.widen(weight, parts, dtype), layer.bias)

    def _numbers(self, words: torch.Tensor) -> torch.Tensor:
        """Return the numbers of words that pack several outputs, [rows, outputs]: all but GPTQ's weights do."""
        numbers = unpack(words, self.size)
        return numbers.view(len(words), -1, 8)[..., list(AWQ_ORDER)].flatten(1) if self.method == "awq" else numbers

    def _order(self, stored: torch.Tensor | None, inputs: int) -> torch.Tensor | None:
        """Return the inputs in the order of their groups; None if they are in order. Raises ValueError if groups have other sizes."""
        if stored is None or not self.group:
            return None
        groups = stored.long() - stored.min()  # a rank's part begins with any group
        regular = torch.arange(inputs, device=groups.device) // self.group
        if torch.equal(groups, regular):
            return None
        order: torch.Tensor = groups.argsort(stable=True)
        if not torch.equal(groups[order], regular):
            raise ValueError(f"its g_idx has groups of other sizes than {self.group}")
        return order


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of words [rows, n], from the lowest bits on: [rows, 32 / bits * n] uint8."""
    places = words.contiguous().view(torch.uint8)
    return places if bits == 8 else torch.stack((places & 15, places >> 4), -1).flatten(-2)

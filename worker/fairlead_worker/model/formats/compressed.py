"""Checkpoints of compressed-tensors: each layer has a scheme, by its name. The library's own code says what their numbers are.

Float8 and 4-bit integers stay so on a GPU that multiplies them. Layers whose inputs the scheme rounds otherwise get ordinary weights, and
their inputs are rounded by the library's functions.
"""

import logging
import re
from collections.abc import Collection, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import CompressedTensorsConfig

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.formats.base import Format, Parts, Pending, Target, count_experts, group_layers, plain_linear
from fairlead_worker.model.formats.integers import NO_EXPERTS, Integers, reason_against_int4, unpack
from fairlead_worker.model.lowbit.choose import choose_rounder
from fairlead_worker.model.lowbit.int4 import int4_problem, unsupported
from fairlead_worker.model.lowbit.linear import CAPABILITY, TILE, Fp8Linear, Fp8WeightLinear
from fairlead_worker.sharding.scales import Groups

logger = logging.getLogger(__name__)

ZERO = "weight_zero_point"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class CompressedTensors(Format):
    """Weights of each scheme that the library reads."""

    method = "compressed-tensors"

    def __init__(self, uri: str, config: Any, names: Collection[str]) -> None:
        """Raises ModelLoadError."""
        self._given, self.target = config.quantization_config, Target(torch.bfloat16)
        self._has_experts = bool(count_experts(config.get_text_config(decoder=True)))
        try:
            found = CompressedTensorsConfig.from_dict(self._given).quantization_config
        except ValueError as error:
            raise ModelLoadError(uri, f"its quantization_config cannot be read: {' '.join(str(error).split())}") from error
        schemes = [] if found is None else [each for each in found.config_groups.values() if each.weights is not None]
        # A scheme for names goes before one for a class of modules.
        self.schemes = sorted(schemes, key=lambda scheme: "Linear" in scheme.targets)
        try:
            self._ignored = Targets(() if found is None else found.ignore or ())
            self._targets = [Targets(scheme.targets) for scheme in self.schemes]
        except re.error as error:
            raise ModelLoadError(uri, f"its quantization_config has a pattern that cannot be read: {error.pattern!r}: {error}") from error
        asymmetric = bool(schemes) and not any(scheme.weights.symmetric for scheme in schemes)
        self.needed = {"weight_packed": ("weight_scale",), "weight_scale": ("weight|weight_packed", *[ZERO] * asymmetric)}
        super().__init__(
            {
                f"{layer}.weight": {part: name for part, name in parts.items() if part != "bias" and (part != ZERO or zeros)}
                for layer, parts in group_layers(names).items()
                if "weight_scale" in parts and (scheme := self.scheme_of(layer)) is not None
                for zeros in (not scheme.weights.symmetric,)
            }
        )

    def scheme_of(self, layer: str) -> Any:
        """Return the scheme of the linear layer with this name; None if it has none."""
        if self._ignored.match(layer):
            return None
        return next((scheme for scheme, targets in zip(self.schemes, self._targets, strict=True) if targets.match(layer)), None)

    @property
    def groups(self) -> Groups:
        weights = [scheme.weights for scheme in self.schemes]
        blocks = [each.block_structure for each in weights if each.block_structure]
        inputs = {*(block[1] for block in blocks), *(each.group_size or 0 for each in weights)}
        return Groups(frozenset(block[0] for block in blocks), frozenset(size for size in inputs if size > 0))

    @property
    def computes(self) -> torch.dtype | None:  # type: ignore[override]  # of 4-bit layers
        return torch.bfloat16 if self.int4 is not None else None

    @cached_property
    def int4(self) -> int | None:
        """Return the inputs of a group (0: all) of weights that may stay in 4 bits: all layers are packed alike. None: they may not."""
        weights = [scheme.weights for scheme in self.schemes]
        kinds = {(each.num_bits, each.type, each.strategy, each.group_size) for each in weights}
        rounded = any(scheme.input_activations or scheme.output_activations for scheme in self.schemes)
        if self._given.get("format") != "pack-quantized" or len(kinds) != 1 or rounded:
            return None
        bits, kind, strategy, group = kinds.pop()
        return max(group or 0, 0) if (bits, kind) == (4, "int") and strategy in ("group", "channel") else None

    def reason_to_widen(self, target: Target) -> str:
        self.target = target
        if self.int4 is not None:
            return NO_EXPERTS if any(".experts." in layer for layer in self.layers) else reason_against_int4(4, target)
        kept = [can_stay(scheme) and (target.quantization == "fp8" or multiplies(scheme, target)) for scheme in self.schemes]
        return "" if kept and all(kept) else super().reason_to_widen(target)

    def find_problem(self, device: torch.device) -> str:
        return int4_problem(device) if self.int4 is not None else ""

    def size_problem(self, outputs: int, inputs: int) -> str:
        if self.int4 is None:
            odd = self.target.quantization != "fp8" and (outputs % TILE or inputs % TILE)
            return f"{outputs} outputs and {inputs} inputs are no multiples of {TILE}" if odd else ""
        return unsupported(outputs, inputs, -(-inputs // self.int4) if self.int4 else 1)

    def widen(self, weight: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        scheme = self.scheme_of(weight.removesuffix(".weight"))
        kind = scheme.format or import_module("compressed_tensors.compressors.format").infer_module_format(nn.Linear, scheme)
        compressor = import_module("compressed_tensors.compressors").BaseCompressor.get_value_from_registry(getattr(kind, "value", kind))
        scale = parts["weight_scale"]
        if scale.dtype in FLOATS and scheme.weights.symmetric:  # the product gets its dtype
            scale = scale.float() if ".experts." in weight and can_stay(scheme) else scale.to(dtype)
        wide: torch.Tensor = compressor.decompress({**parts, "weight_scale": scale}, scheme)["weight"]
        return wide.to(dtype)

    def layer(self, weight: str, layer: Pending, parts: Parts, dtype: torch.dtype) -> nn.Module:
        scheme, outputs, inputs = self.scheme_of(weight.removesuffix(".weight")), layer.out_features, layer.in_features
        if self.int4 is not None and self.keeps and not layer.is_head and not self.size_problem(outputs, inputs):
            return self._integers(parts, outputs, inputs).kept(layer.bias)
        # The head may be the embedding too, and an expert may see no token of a step.
        if can_stay(scheme) and not layer.is_head and ".experts." not in weight and parts["weight"].dtype == torch.float8_e4m3fn:
            scale = parts["weight_scale"].float().reshape(-1, 1).expand(outputs, 1).contiguous()
            values, bias = parts["weight"].contiguous(), layer.bias  # products need contiguous weights
            if multiplies(scheme, self.target) and not (outputs % TILE or inputs % TILE):
                return Fp8Linear(values, scale, bias, dtype, choose_rounder(values.device))
            if self.target.quantization == "fp8":
                return Fp8WeightLinear(values, scale, bias, dtype)
        plain = plain_linear(self.widen(weight, parts, dtype), layer.bias)
        if scheme.input_activations is None and scheme.output_activations is None:
            return plain
        further = {name: part.to(dtype) if name.endswith("put_scale") else part for name, part in parts.items() if "put_" in name}
        return RoundingLinear(plain, scheme, further)

    def _integers(self, parts: Parts, outputs: int, inputs: int) -> Integers:
        scale, zeros = parts["weight_scale"], parts.get(ZERO)
        zero = torch.full(scale.shape, 8, dtype=torch.int32, device=scale.device)
        if zeros is not None:
            zero = unpack(zeros.T, 4)[:, :outputs].T.to(torch.int32)
        return Integers(unpack(parts["weight_packed"], 4)[:, :inputs], scale, zero, self.int4 or inputs)


class RoundingLinear(nn.Linear):
    """A layer of ordinary weights whose inputs or outputs compressed-tensors rounds."""

    rounds = True
    """See `LowBitLinear`."""

    def __init__(self, plain: nn.Linear, scheme: Any, further: Mapping[str, torch.Tensor]) -> None:
        """further: scales and zero points of inputs and outputs, by the library's names."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.weight, self.bias = plain.in_features, plain.out_features, plain.weight, plain.bias
        self.scheme, self.quantization_status = scheme, import_module("compressed_tensors.quantization").QuantizationStatus.COMPRESSED
        self._round = import_module("compressed_tensors.quantization.lifecycle.forward").forward_quantize
        for name, tensor in further.items():
            self.register_buffer(name, tensor)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply [..., inputs]. The library finds a scale for each token in [1, T, inputs] alone."""
        rows = inputs.reshape(1, -1, self.in_features)
        if self.scheme.input_activations is not None:
            rows = self._round(self, rows, "input", self.scheme.input_activations)
        answer = functional.linear(rows, self.weight, self.bias)
        if self.scheme.output_activations is not None:
            answer = self._round(self, answer, "output", self.scheme.output_activations)
        return answer.view(*inputs.shape[:-1], self.out_features)


class Targets:
    """Linear layers by their names, patterns of these or their class. The library's `is_match` compares each target with each layer:
    36,000 layers beside 241 ignored names take it 30 s of a busy core, and this 0.07 s.
    """

    def __init__(self, targets: Collection[str]) -> None:
        """Raises re.error."""
        self._names = frozenset(targets)
        self._patterns = [re.compile(target.removeprefix("re:")) for target in targets if target.startswith("re:")]

    def match(self, layer: str) -> bool:
        """Return whether the linear layer with this name is one of the targets."""
        names = self._names
        return layer in names or "Linear" in names or "Module" in names or any(pattern.match(layer) for pattern in self._patterns)


def can_stay(scheme: Any) -> bool:
    """Return whether a layer with this scheme can stay in 8 bits.

    Its weight must be float8 with one scale, or one for each output. Its inputs must be unrounded, or rounded by each token's largest one.
    """
    weights, inputs = scheme.weights, scheme.input_activations
    if scheme.output_activations is not None or not _is_float8(weights) or weights.strategy not in ("channel", "tensor"):
        return False
    return inputs is None or (_is_float8(inputs) and inputs.dynamic is True and inputs.strategy == "token")


def multiplies(scheme: Any, target: Target) -> bool:
    """Return whether inputs are rounded, and the device multiplies float8: products with row scales exist only for bfloat16."""
    on_gpu = target.capability is not None and target.capability >= CAPABILITY
    return scheme.input_activations is not None and target.dtype == torch.bfloat16 and on_gpu


def _is_float8(numbers: Any) -> bool:
    return numbers.type == "float" and numbers.num_bits == 8 and bool(numbers.symmetric)

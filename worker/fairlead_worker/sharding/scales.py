"""A rank's part of the tensors of a quantized weight in a checkpoint: scales, zero points, and words that pack several numbers.

Each entry of such a tensor covers a run of the weight's outputs or inputs. The weight's cut, in outputs or inputs, becomes a cut in
runs. If it falls inside a run, the part has no entries of its own and is rejected. Weights that are dequantized while they are read
are an exception: a finer grid of scales gives the same numbers there, so both ranks get the entry of a run that they share.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from fairlead_worker.sharding.shards import AnyCut, Cut, Pieces, Unshardable

RUNS = ("weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point")
"""Tensors with one entry per run of a weight's outputs and inputs."""
TRANSPOSED = ("qweight", "qzeros", "scales")
"""The same in AWQ and GPTQ, which have outputs in the second dimension."""
WORDS = ("weight_packed", "qweight")
ZEROS = ("weight_zero_point", "qzeros")
ORDERS = ("weight_g_idx", "g_idx")
"""Tensors with the group of each input."""
ONE = (
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "activation_scale",
)
"""Tensors with one entry for the whole layer, equal on every rank."""
SHAPE = "weight_shape"
MX = ("blocks", "scales")
"""What follows the name of a weight in MXFP4, of all experts of a layer (gpt-oss)."""
MX_BYTES = 16
"""Of a group of 32 numbers with one scale."""
WORD_BITS = {"I32": 32, "U8": 8}
"""Bits of words that pack several numbers."""


@dataclass(frozen=True, slots=True)
class Groups:
    """How many outputs or inputs share a scale: each size that the checkpoint's config names for its layer groups."""

    outputs: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()
    widened: bool = False
    """Whether weights are dequantized while they are read, with any grid of scales."""
    made: int = 0
    """Inputs that share a scale made at load; 0: a scale for a whole row, or none is made."""
    act_order: bool = True
    """Whether a group may have inputs of any place."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A rank's part of a grid of scales that is not cut between two entries: entry `i` is entry `entries[i]` of the whole."""

    dim: int
    entries: tuple[int, ...]

    def read(self, tensor: Any) -> torch.Tensor:
        first, last = self.entries[0], self.entries[-1]
        part: torch.Tensor = tensor[(*(slice(None) for _ in range(self.dim)), slice(first, last + 1))]
        return part.index_select(self.dim, torch.tensor(self.entries) - first)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a weight, adjusted to the rank's part."""

    cut: AnyCut

    def read(self, tensor: Any) -> torch.Tensor:
        shape: torch.Tensor = tensor[...].clone()
        shape[self.cut.dim] = sum(part.end - part.begin for part in self.cut.parts)
        return shape


@dataclass(frozen=True, slots=True)
class Bytes:
    """A rank's part of experts' blocks [experts, outputs, groups, 16] in MXFP4, which may divide a group: some bytes of each output."""

    begin: int
    end: int

    def read(self, tensor: Any) -> torch.Tensor:
        """Return [experts, outputs, bytes]."""
        first = self.begin // MX_BYTES
        groups: torch.Tensor = tensor[:, :, first : -(-self.end // MX_BYTES)]
        return groups.flatten(2)[..., self.begin - first * MX_BYTES : self.end - first * MX_BYTES]


def find_mx_part(key: str, cut: Cut) -> Cut | Spread | Bytes:
    """Return the part of tensor `key` of experts in MXFP4, of whose weight [experts, inputs, outputs] the rank has `cut`. Raises
    Unshardable.
    """
    if cut.dim == 2:
        return replace(cut, dim=1)
    if cut.begin % 2 or cut.end % 2:
        raise Unshardable(f"{key} has two numbers in a byte, and {_part(replace(cut, dim=1))} does not begin and end between two bytes")
    if key.endswith(MX[0]):
        return Bytes(cut.begin // 2, cut.end // 2)
    finer = math.gcd(cut.begin, cut.end, 2 * MX_BYTES)
    return Spread(2, tuple(place // (2 * MX_BYTES) for place in range(cut.begin, cut.end, finer)))


def find_part(key: str, shape: list[int], kind: str, cut: AnyCut, groups: Groups) -> Cut | Pieces | Spread | Shape | None:
    """Return the part of tensor `key`, which accompanies a weight of which the rank has `cut`; None: all of it. Raises Unshardable.

    shape, kind: of the whole tensor, as in the file.
    """
    name = key.rpartition(".")[2]
    if name == SHAPE:
        return Shape(cut)
    if name in ONE or name == "bias":  # the bias of a row-wise layer, which is added once
        return None
    if isinstance(cut, Pieces):
        found = [find_part(key, shape, kind, part, groups) for part in cut.parts]
        if any(isinstance(part, Spread) for part in found):
            raise Unshardable(f"{key} has entries that a rank's part of several sections divides: use fewer ranks")
        return Pieces(tuple(part for part in found if isinstance(part, Cut))) if found[0] is not None else None
    if name in ORDERS:
        if cut.dim == 0:
            return None
        if not groups.act_order:
            return replace(cut, dim=0)
        raise Unshardable(f"{key}: groups of inputs in any order (act-order) are on no single rank")
    if name not in RUNS and name not in TRANSPOSED:
        raise Unshardable(f"{key} accompanies a divided weight, and its own division is unknown")
    dim = 1 - cut.dim if name in TRANSPOSED else cut.dim
    if len(shape) <= dim:
        return None
    count = shape[dim]
    if count == cut.whole:
        return replace(cut, dim=dim)
    packed = kind in WORD_BITS and len(shape) > 1
    if packed and (name in WORDS or (name in ZEROS and cut.dim == 0)):
        return replace(_words(key, count, WORD_BITS[kind], cut), dim=dim)
    each = _run(key, count, cut, groups)
    if each == 0:
        return None
    if cut.begin % each == 0 and (cut.end % each == 0 or (cut.end == cut.whole and not groups.widened)):
        return Cut(dim, cut.begin // each, -(-cut.end // each))
    if not groups.widened:
        raise Unshardable(
            f"{key} has one entry for {each} {_what(cut)}, and {_part(cut)} does not begin and end between two of them: use fewer ranks"
        )
    finer = math.gcd(cut.begin, cut.end, each)
    return Spread(cut.dim, tuple(place // each for place in range(cut.begin, cut.end, finer)))


def check_made(path: str, inputs: int, whole: int, groups: Groups) -> None:
    """Raise Unshardable if a whole row-wise layer could be quantized at load, and one rank's `inputs` cannot."""
    if groups.made and inputs % groups.made and not whole % groups.made:
        raise Unshardable(
            f"{path} is quantized in groups of {groups.made} inputs, and a rank would have {inputs} of its {whole}, "
            "no multiple of them: use fewer ranks, or --quantization fp8"
        )


def _words(key: str, count: int, bits: int, cut: Cut) -> Cut:
    each = bits * count // cut.whole  # bits of a number
    if cut.begin * each % bits or (cut.end * each % bits and cut.end != cut.whole):
        raise Unshardable(
            f"{key} has {bits}-bit words of numbers of {each} bits, and {_part(cut)} does not begin and end between two words: "
            "use fewer ranks"
        )
    return Cut(cut.dim, cut.begin * each // bits, -(-cut.end * each // bits))


def _run(key: str, count: int, cut: Cut, groups: Groups) -> int:
    """Return how many outputs or inputs each of `count` entries covers. 0: one entry covers all, and the cut may divide it."""
    sizes = groups.inputs if cut.dim else groups.outputs
    fitting = sorted((size for size in sizes if -(-cut.whole // size) == count), key=lambda size: (cut.whole % size, size))
    if count == 1 and (groups.widened or not fitting):
        return 0
    if not fitting:
        known = ", ".join(map(str, sorted(sizes))) or "none"
        raise Unshardable(f"{key} has {count} entries for {cut.whole} {_what(cut)}, which are of no size that its config names ({known})")
    return fitting[0]


def _what(cut: Cut) -> str:
    return "inputs" if cut.dim else "outputs"


def _part(cut: Cut) -> str:
    return f"a rank's part ({_what(cut)} {cut.begin} to {cut.end} of {cut.whole})"

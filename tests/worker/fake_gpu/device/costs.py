"""Bytes and operations of one call of torch, from its arguments and its result."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

GATHERS = {aten.embedding, aten.index, aten.index_select, aten.gather, aten._unsafe_index}
"""Read only the rows that their indices name, as many bytes as they write."""
SCATTERS = {aten.index_copy_, aten.index_put_, aten.index_add_, aten.scatter_, aten.scatter_add_, aten._index_put_impl_}
"""Write only the rows that their indices name, as many bytes as their source has."""
WRITES = {aten.fill_, aten.zero_, aten.copy_, aten.normal_, aten.uniform_}
"""Do not read the tensor that they write."""
PRODUCTS = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm, aten._scaled_mm_v2, aten._grouped_mm, aten._scaled_grouped_mm,
    aten._weight_int4pack_mm, aten._int_mm,
}  # fmt: skip
GROUPED = {aten._grouped_mm, aten._scaled_grouped_mm}


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of memory behind `tensor`; an expanded dimension counts once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride or size == 0 else 1
    return numel * tensor.element_size()


def tensors(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def bytes_of(packet: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that a call reads and writes."""
    inputs, outputs = tensors(args, kwargs), tensors(out)
    if packet in GATHERS:
        return 2 * _sum(outputs) + _sum(_indices(inputs))
    if packet in SCATTERS:
        return 2 * _sum(inputs[-1:]) + _sum(inputs[1:-1])
    if packet in GROUPED:
        rows, weight = inputs[0], inputs[1]
        used = used_share(weight.shape[0], rows.shape[0]) if weight.dim() == 3 else 1.0
        return size_of(rows) + int(size_of(weight) * used) + _sum(inputs[2:]) + _sum(outputs)
    return _sum(inputs[1:] if packet in WRITES else inputs) + _sum(outputs)


def used_share(experts: int, rows: int) -> float:
    """Return the expected share of `experts` that `rows` independent choices use."""
    return 1.0 - (1.0 - 1.0 / experts) ** rows


def flops_of(packet: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Return twice the number of multiplications; 0 for what is no product."""
    if packet is aten._weight_int4pack_mm:
        return int(2 * args[0].numel() * out.shape[-1])
    if packet in GROUPED or packet is aten._scaled_mm_v2:
        return int(2 * args[0].numel() * out.shape[-1])  # each row meets one expert, or the one weight
    counted = flop_registry.get(packet)
    return 0 if counted is None else int(counted(*args, **kwargs, out_val=out))


def dtype_of(packet: Any, args: Sequence[Any]) -> str:
    """Return the dtype of a product's second operand, its weight; empty for what is no product."""
    if packet not in PRODUCTS:
        return ""
    if packet is aten._weight_int4pack_mm:
        return "int4"
    operands = tensors(args)
    return str(operands[2 if packet in (aten.addmm, aten.baddbmm) else 1].dtype).removeprefix("torch.")


def _indices(inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [part for part in inputs if part.dtype in (torch.int64, torch.int32)][-1:]


def _sum(parts: Iterable[torch.Tensor]) -> int:
    return sum(map(size_of, parts))

"""Rotary embeddings in one kernel that rotates queries and keys in place, from one table of all positions.

The model's rotary module returns (positions, table) instead of (cosines, sines). The attention's own forward runs with another
`apply_rotary_pos_emb`: the same code, over globals in which that one name is replaced. Other models are not affected. Tables are
float32, as the library requires; transformers rounds its cosines to the model's dtype.
"""

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fairlead_worker.kernels.base import LayerSpec
from fairlead_worker.kernels.flashinfer_library import HEAD_DIMS
from fairlead_worker.model.fused.library import Library
from fairlead_worker.model.fused.patch import Patch, Unfused
from fairlead_worker.model.structure import UnknownStructure, by_type, rope_tables

APPLY = "apply_rotary_pos_emb"


@dataclass(frozen=True, slots=True, eq=False)
class RopeCache:
    """The forward of a rotary module."""

    tables: dict[str | None, torch.Tensor]
    """[positions, rotated dimensions] of each layer type; None: of all layers."""

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return position_ids[0].contiguous(), self.tables[layer_type]


@dataclass(frozen=True, slots=True, eq=False)
class ApplyRope:
    """Replacement for `apply_rotary_pos_emb`."""

    library: Library

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate query [1, heads, T, dim] and key [1, kv_heads, T, dim]; for unsqueeze_dim 2 heads come after T."""
        first = [part[0].transpose(0, 1) if unsqueeze_dim == 1 else part[0] for part in (query, key)]
        flat = [part.reshape(len(positions), -1) for part in first]
        self.library.apply_rope_with_cos_sin_cache_inplace(positions, flat[0], flat[1], query.shape[-1], table)
        turned = [part.view(whole.shape) for part, whole in zip(flat, first, strict=True)]
        query, key = (part.transpose(0, 1)[None] if unsqueeze_dim == 1 else part[None] for part in turned)
        return query, key


def rope_patches(model: PreTrainedModel, library: Library, layers: tuple[LayerSpec, ...], limit: int) -> list[Patch]:
    """Return patches of the rotary module of `model` and of all attention modules. Raises Unfused.

    limit: positions of the longest request.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    attentions = [part.self_attn for part in getattr(model.base_model, "layers", ()) if hasattr(part, "self_attn")]
    if rotary is None or len(attentions) != len(layers):
        raise Unfused("it has no rotary_emb for all of its layers")
    if other := {spec.key_dim for spec in layers} - set(HEAD_DIMS):
        raise Unfused(f"its heads are of {', '.join(map(str, sorted(other)))}, and the kernel is for {', '.join(map(str, HEAD_DIMS))}")
    kinds = sorted({attention.layer_type for attention in attentions}) if by_type(rotary) else [None]
    turn = ApplyRope(library)
    try:
        tables = {kind: _table(rotary, kind, limit).to(model.device) for kind in kinds}
    except UnknownStructure as reason:
        raise Unfused(str(reason)) from reason
    forwards = {kind: rebind_global(kind.forward, APPLY, turn) for kind in {type(attention) for attention in attentions}}
    return [
        Patch(rotary, RopeCache(tables)),
        *(Patch(attention, types.MethodType(forwards[type(attention)], attention)) for attention in attentions),
    ]


@torch.inference_mode()
def _table(rotary: nn.Module, kind: str | None, limit: int) -> torch.Tensor:
    """Return [limit, rotated dimensions] float32: cosines, then sines. Raises Unfused if a position's angles depend on the text length."""
    make = rope_tables(rotary, kind)
    short, table, again = (torch.cat(make(positions), 1) for positions in (8, limit, 8))
    if not torch.equal(short, table[:8]) or not torch.equal(short, again[:8]):
        raise Unfused("its angles depend on the length of a text")
    return table


def rebind_global(forward: Callable[..., Any], name: str, meaning: Callable[..., Any]) -> types.FunctionType:
    """Return a copy of the function in which the global `name` has another meaning. Raises Unfused if the function does not use it."""
    if not isinstance(forward, types.FunctionType) or inspect.unwrap(forward) is not forward:
        raise Unfused("the forward of its attention is decorated")
    if name not in forward.__code__.co_names or name not in forward.__globals__:
        raise Unfused(f"the forward of its attention calls no {name}")
    scope = {**forward.__globals__, name: meaning}
    copy = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy

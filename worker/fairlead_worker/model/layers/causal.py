"""Causal self-attention of decoders, over packed rows and the KV that a step's context has of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from fairlead_worker.kernels.base import LayerSpec, StepContext
from fairlead_worker.model.attention import sink_numbers
from fairlead_worker.model.layers.norm import PlainRmsNorm
from fairlead_worker.model.layers.rotary import StepRotation
from fairlead_worker.model.layers.stack import Projections, Stack

HeadNorms = Literal["none", "each", "all", "rotated"]
"""Norms of queries and keys: none, of each head, of all heads together, or of each head after its rotation, without weights (Llama 4)."""


class AttentionNames(NamedTuple):
    """Names of the parts of attention in checkpoints, besides the projections of its input."""

    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"


LLAMA = AttentionNames()


class CausalAttention(Projections):
    """Attention with grouped heads (Ainslie et al. 2023)."""

    STACK = "qkv_proj"
    PARTS: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        width: int,
        index: int,
        spec: LayerSpec,
        make_norm: Callable[[int], nn.Module],
        *,
        bias: bool,
        output_bias: bool,
        stacked: bool,
        sinks: bool,
        head_norms: HeadNorms,
        rotates_first: bool = False,
        gated: bool = False,
        names: AttentionNames = LLAMA,
        parts: int = 3,
    ) -> None:
        """spec: of the whole model. index: among layers with attention. make_norm: for a width. stacked: see `add_projections`.
        parts: how many of `PARTS` it has.

        gated: `q_proj` has a gate after each head's query, which the head's output is multiplied by (Qwen3-Next).
        """
        super().__init__()
        self.index, self.head_dim, self.head_norms, self.rotates_first = index, spec.key_dim, head_norms, rotates_first
        self._spec, self.gated, self.names = spec, gated, names
        sizes = [heads * self.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
        self.PARTS = self.PARTS[:parts]
        self.add_projections(width, [sizes[0] * (1 + gated), *sizes[1:parts]], bias, stacked)
        self.add_module(names.output, nn.Linear(sizes[0], width, output_bias))
        if head_norms in ("each", "all"):
            for name, size in zip(names[1 : 1 + min(parts, 2)], sizes, strict=False):
                self.add_module(name, make_norm(self.head_dim if head_norms == "each" else size))
        self.rotated_norm = PlainRmsNorm(make_norm(1).eps) if head_norms == "rotated" else None  # type: ignore[arg-type]  # a norm's number
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if sinks else None

    @property
    def spec(self) -> LayerSpec:
        """Return what the layer needs of attention; of a sharded model, this rank's part."""
        heads, kv_heads = self._spec.heads, self._spec.kv_heads
        if self.whole is None or isinstance(self.whole, Stack):
            heads, *of_keys = (getattr(self, name).out_features // self.head_dim for name in self.PARTS[:2])
            heads //= 1 + self.gated
            kv_heads = of_keys[0] if of_keys else max(1, kv_heads * heads // self._spec.heads)
        sinks = None if self.sinks is None else sink_numbers(self.sinks)
        return replace(self._spec, heads=heads, kv_heads=kv_heads, sinks=sinks)

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        """Return the projection after attention, and the norms of queries and keys; None: there are none."""
        output, query_norm, key_norm = map(self._modules.get, self.names)
        return output, query_norm, key_norm

    def forward(self, states: torch.Tensor, rotation: StepRotation | None, context: StepContext) -> torch.Tensor:
        """Return [T, width] for states [T, width]. rotation: rotates queries and keys; None: they have no positions."""
        query, key, value = self.project(states)
        output, query_norm, key_norm = self.parts
        if self.head_norms == "all":
            query, key = query_norm(query), key_norm(key)
        query, key, value = (torch.unflatten(part, -1, (-1, self.head_dim)) for part in (query, key, value))
        if self.gated:
            query, gate = query[:, ::2], query[:, 1::2]
        if self.rotates_first and rotation is not None:
            query, key = rotation(query, key)
        if self.head_norms == "each":
            query, key = query_norm(query), key_norm(key)
        if rotation is not None and not self.rotates_first:
            query, key = rotation(query, key)
        if self.rotated_norm is not None:
            query, key = self.rotated_norm(query), self.rotated_norm(key)
        mixed = context.attend(self.index, query, key, value)
        if self.gated:
            mixed = mixed * gate.sigmoid()
        attended: torch.Tensor = output(mixed.flatten(1))
        return attended

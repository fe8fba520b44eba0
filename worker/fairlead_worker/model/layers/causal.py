"""Causal self-attention of decoders, over packed rows and the KV that a step's context has of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from fairlead_worker.kernels.base import LayerSpec, StepContext
from fairlead_worker.model.attention import sink_numbers
from fairlead_worker.model.layers.norm import mean_square
from fairlead_worker.model.layers.rotary import StepRotation
from fairlead_worker.model.layers.stack import Projections
from fairlead_worker.model.lowbit.linear import is_plain
from fairlead_worker.sharding.group import Group
from fairlead_worker.sharding.shards import AnyCut, Cut, Ranks

HeadNorms = Literal["none", "each", "own", "all"]
"""Norms of queries and keys: none, of each head, of each head by its own weights, or of all heads together."""


class AttentionNames(NamedTuple):
    """Names of the parts of attention in checkpoints, besides the projections of its input."""

    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    stack: str = "qkv_proj"
    """Of the one matrix of queries, keys and values, if there is one."""


LLAMA = AttentionNames()


class CausalAttention(Projections):
    """Attention with grouped heads (Ainslie et al. 2023)."""

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
        make_head_norm: Callable[[int], nn.Module] | None = None,
        rotates_first: bool = False,
        by_head: bool = False,
        gated: bool = False,
        names: AttentionNames = LLAMA,
        parts: int = 3,
    ) -> None:
        """spec: of the whole layer. index: among layers with attention. make_norm: for a width. stacked: see `add_projections`.
        parts: how many of `PARTS` it has. make_head_norm, rotates_first, by_head: see `Definition`.

        gated: `q_proj` has a gate after each head's query, which the head's output is multiplied by (Qwen3-Next).
        """
        super().__init__()
        self.index, self.head_dim, self.head_norms, self.rotates_first = index, spec.key_dim, head_norms, rotates_first
        self._spec, self.gated, self.by_head, self.names, self.STACK = spec, gated, by_head, names, names.stack
        self.ranks: Group | None = None
        """Those that share the heads; None while the model is not connected."""
        self.orders: dict[str, torch.Tensor] = {}
        """Name of a projection whose outputs have another order than in the checkpoint -> their numbers there."""
        sizes = [heads * self.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
        self.PARTS = self.PARTS[:parts]
        self.add_projections(width, [sizes[0] * (1 + gated), *sizes[1:parts]], bias, stacked)
        self.add_module(names.output, nn.Linear(sizes[0], width, output_bias))
        if head_norms != "none":
            for name, size in zip(names[1 : 1 + min(parts, 2)], sizes, strict=False):
                norm = (make_head_norm or make_norm)(size if head_norms == "all" else self.head_dim)
                if head_norms == "own":
                    norm.weight = nn.Parameter(torch.empty(size // self.head_dim, self.head_dim))
                self.add_module(name, norm)
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if sinks else None

    @property
    def spec(self) -> LayerSpec:
        """Return what the layer needs of attention; of a sharded model, this rank's part."""
        return replace(self._spec, sinks=None if self.sinks is None else sink_numbers(self.sinks))

    def divide(self, ranks: Ranks) -> dict[str, AnyCut]:
        """Keep a rank's heads; return the parts of its tensors, by name. Raises Unshardable."""
        heads, kv_heads, dim = self._spec.heads, self._spec.kv_heads, self.head_dim
        ranks.share(heads, "heads")
        of_queries, of_keys = ranks.span(heads, "heads"), ranks.span(kv_heads, "heads of keys and values")
        units = (dim * (1 + self.gated), dim, dim)
        spans = [(begin * unit, end * unit) for (begin, end), unit in zip((of_queries, of_keys, of_keys), units, strict=True)]
        cuts, whole = {self.names.output: ranks.cut(heads * dim, dim=1)}, self.sizes
        if self.by_head:
            cuts[self.STACK] = ranks.cut(sum(self.sizes))
            self.divide_projections(spans)
        else:
            cuts |= self.divide_projections(spans[: len(self.sizes)])
        if self.sinks is not None:
            cuts["sinks"] = Cut(0, *of_queries, heads)
        norms = self.names.query_norm, self.names.key_norm
        if self.head_norms == "own":
            cuts |= {norms[0]: Cut(0, *of_queries, heads), norms[1]: Cut(0, *of_keys, kv_heads)}
        elif self.head_norms == "all":
            cuts |= {name: Cut(0, *span, size) for name, span, size in zip(norms, spans, whole, strict=False)}
        self._spec = replace(self._spec, heads=of_queries[1] - of_queries[0], kv_heads=of_keys[1] - of_keys[0])
        return cuts

    def stack(self) -> bool:
        """Stack queries, keys and values, in place, as `Projections.stack`; or put them in this order in their one matrix."""
        whole = self.whole
        if not self.by_head or type(whole) is not nn.Linear or not is_plain(whole):
            return super().stack()
        order = torch.arange(whole.out_features).view(-1, 3, self.head_dim).transpose(0, 1).flatten()
        for name, values in list(whole.named_parameters()):
            setattr(whole, name, nn.Parameter(values[order.to(values.device)], requires_grad=False))
        self.by_head, self.orders = False, {self.STACK: order}
        return True

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        """Return the projection after attention, and the norms of queries and keys; None: there are none."""
        output, query_norm, key_norm = map(self._modules.get, self.names[:3])
        return output, query_norm, key_norm

    def forward(self, states: torch.Tensor, rotation: StepRotation | None, context: StepContext) -> torch.Tensor:
        """Return [T, width] for states [T, width]. rotation: rotates queries and keys; None: they have no positions."""
        if self.by_head:
            query, key, value = (part.flatten(1) for part in self.whole(states).view(len(states), -1, 3, self.head_dim).unbind(2))
        else:
            query, key, value = self.project(states)
        output, query_norm, key_norm = self.parts
        if self.head_norms == "all" and self.ranks is not None:
            means = self.ranks.add(torch.cat((mean_square(query), mean_square(key)), -1)) / self.ranks.size
            query, key = query_norm(query, mean=means[:, :1]), key_norm(key, mean=means[:, 1:])
        elif self.head_norms == "all":
            query, key = query_norm(query), key_norm(key)
        query, key, value = (torch.unflatten(part, -1, (-1, self.head_dim)) for part in (query, key, value))
        if self.gated:
            query, gate = query[:, ::2], query[:, 1::2]
        if self.rotates_first and rotation is not None:
            query, key = rotation(query, key)
        if self.head_norms in ("each", "own"):
            query, key = query_norm(query), key_norm(key)
        if rotation is not None and not self.rotates_first:
            query, key = rotation(query, key)
        mixed = context.attend(self.index, query, key, value)
        if self.gated:
            mixed = mixed * gate.sigmoid()
        attended: torch.Tensor = output(mixed.flatten(1))
        return attended

"""Attention of Gemma 3n and 4: the last layers read the keys and values of the last earlier layer of their kind, which stores them once."""

from collections.abc import Callable

import torch
from torch import nn

from fairlead_worker.kernels.base import LayerSpec, StepContext
from fairlead_worker.model.layers.causal import CausalAttention
from fairlead_worker.model.layers.norm import RmsNorm
from fairlead_worker.model.layers.rotary import StepRotation

SharedKv = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""The keys and values of a step, by the kind of the layers that may read them."""


class SharingAttention(CausalAttention):
    """Attention with norms of queries, keys and values. Those of values have no weights."""

    def __init__(
        self,
        width: int,
        index: int,
        spec: LayerSpec,
        make_norm: Callable[[int], nn.Module],
        kind: str,
        eps: float,
        *,
        bias: bool,
        parts: int,
    ) -> None:
        """As `CausalAttention`. kind: of the layer, as a key of `SharedKv`. parts: 1 if it has a source; 2: values are the keys."""
        super().__init__(
            width, index, spec, make_norm, bias=bias, output_bias=bias, stacked=False, sinks=False, head_norms="each", parts=parts
        )
        self.kind, self.value_norm = kind, RmsNorm(spec.value_dim, eps, weight=False)

    def attend(self, states: torch.Tensor, rotation: StepRotation, context: StepContext, shared: SharedKv) -> torch.Tensor:
        """Return [T, width] for states [T, width]."""
        output, query_norm, key_norm = self.parts
        query, *stored = (torch.unflatten(part, -1, (-1, self.head_dim)) for part in self.project(states))
        if stored:
            key, value = stored[0], self.value_norm(stored[-1])
            query, key = rotation(query_norm(query), key_norm(key))
            shared[self.kind] = key, value
        else:
            query, _ = rotation(query_norm(query), torch.zeros_like(query[:, :1]))
        mixed = context.attend(self.index, query, *shared[self.kind])
        attended: torch.Tensor = output(mixed.flatten(1))
        return attended

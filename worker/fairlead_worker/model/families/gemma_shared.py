"""Gemma 3n and 4 (Gemma Team 2025, 2026): layers that share keys and values, and an embedding of each token for each layer."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fairlead_worker.kernels.base import StepContext
from fairlead_worker.model.decoder import Body
from fairlead_worker.model.definition import AROUND, Definition, windows_of
from fairlead_worker.model.layers.mlp import ACTIVATIONS
from fairlead_worker.model.layers.norm import RmsNorm
from fairlead_worker.model.layers.sharing import SharedKv, SharingAttention


class GemmaLayer(nn.Module):
    """What layers of both have: attention and an MLP between norms, and a gate for the layer's own embedding."""

    def __init__(self, definition: Definition, index: int) -> None:
        super().__init__()
        config, width = definition.config, definition.width
        self.kind, self.activation = config.layer_types[index], ACTIVATIONS[definition.activation]
        self.self_attn = _make_attention(definition, index)
        self.mlp: nn.Module = self.make_mlp(config, index)
        self.input_layernorm, self.post_attention_layernorm, self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (
            definition.make_norm(width) for _ in AROUND
        )
        if inner := getattr(config, "hidden_size_per_layer_input", 0):
            self.per_layer_input_gate = nn.Linear(width, inner, bias=False)
            self.per_layer_projection = nn.Linear(inner, width, bias=False)
            self.post_per_layer_input_norm = definition.make_norm(width)

    def make_mlp(self, config: Any, index: int) -> nn.Module:
        """Return the MLP of layer `index`. Gemma 3n and Gemma 4 have their own, each in its subclass."""
        raise NotImplementedError

    def add_own(self, states: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return [T, width]: the layer's own embedding [T, inner], as far as states [T, width] let it through."""
        out: torch.Tensor = self.post_per_layer_input_norm(
            self.per_layer_projection(self.activation(self.per_layer_input_gate(states)) * own)
        )
        return out


class GemmaBody(Body):
    """A decoder whose tokens have an embedding for each layer, beside the usual one."""

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        config, width = definition.config, definition.width
        self.inner = getattr(config, "hidden_size_per_layer_input", 0)
        if self.inner:
            sizes = len(definition.windows) * self.inner
            self.embed_tokens_per_layer = nn.Embedding(config.vocab_size_per_layer_input, sizes)
            self.per_layer_model_projection = nn.Linear(width, sizes, bias=False)
            self.per_layer_projection_norm = definition.make_norm(self.inner)
        self.inputs = getattr(config, "altup_num_inputs", 1)
        if self.inputs > 1:
            self.altup_projections, self.altup_unembed_projections = (
                nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(1, self.inputs)) for _ in range(2)
            )

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, context: StepContext) -> torch.Tensor:
        states, shared = self.embed(tokens, positions), SharedKv()
        own = self._own(tokens, states) if self.inner else [None] * len(self.layers)
        rotations = {kind: rope.at(positions) for kind, rope in self.ropes.items()}
        if self.inputs > 1:
            states = torch.stack(self._alike(states, [project(states) for project in self.altup_projections]))
        for layer, embedded in zip(self.layers, own, strict=True):
            states = layer(states, embedded, rotations[layer.kind], context, shared)  # type: ignore[index]  # a layer's kind is a text
        if self.inputs > 1:
            others = [project(part) for project, part in zip(self.altup_unembed_projections, states[1:], strict=True)]
            states = torch.stack(self._alike(states[0], others)).mean(0)
        out: torch.Tensor = self.last_norm(states)
        return out

    def _own(self, tokens: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
        """Return each layer's embedding [T, inner]: looked up, and projected from the usual one."""
        table = self.embed_tokens_per_layer
        found = table(torch.where(tokens < table.num_embeddings, tokens, 0)) * states.new_tensor(self.inner**0.5)
        projected = (self.per_layer_model_projection(states) * states.new_tensor(states.shape[-1] ** -0.5)).unflatten(-1, (-1, self.inner))
        own = (self.per_layer_projection_norm(projected) + found.unflatten(-1, (-1, self.inner))) * states.new_tensor(0.5**0.5)
        return list(own.unbind(1))

    @staticmethod
    def _alike(first: torch.Tensor, others: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return states of the length that `first` has, each [T, width]."""
        length = first.square().mean(-1, keepdim=True).sqrt()
        return [first, *(other * length / other.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt() for other in others)]


def define_gemma(config: Any, layer: type[GemmaLayer]) -> Definition:
    return Definition.read(
        config,
        inner=0,
        activation=config.hidden_activation,
        make_norm=partial(RmsNorm, eps=config.rms_norm_eps),
        norms=AROUND,
        windows=windows_of(config),
        ropes=tuple(config.layer_types),
        scaling=1.0,
        embedding_scale=config.hidden_size**0.5,
        rounds_embedding_scale=True,
        logits_softcap=config.final_logit_softcapping,
        make_layer=layer,
        make_body=GemmaBody,
    )


def sharing_modes(config: Any) -> list[str | None]:
    """Return of each layer whether it stores keys and values that others may read ("store") or reads them ("reuse")."""
    modes: list[str | None] = getattr(config, "kv_sharing_modes", None) or [None] * config.num_hidden_layers
    return modes


def _make_attention(definition: Definition, index: int) -> SharingAttention:
    config, modes, kinds = definition.config, sharing_modes(definition.config), definition.config.layer_types
    try:
        own = config.per_layer_config[index]
    except (AttributeError, ValueError):
        own = config
    source = next(at for at in range(index, -1, -1) if kinds[at] == kinds[index] and modes[at] != "reuse")
    spec = replace(
        definition.spec(index),
        kv_heads=own.num_key_value_heads,
        key_dim=own.head_dim,
        value_dim=own.head_dim,
        source=None if source == index else source,
    )
    parts = 1 if source != index else 2 if getattr(config, "attention_k_eq_v", False) and kinds[index] != "sliding_attention" else 3
    return SharingAttention(
        definition.width, index, spec, definition.make_norm, kinds[index], config.rms_norm_eps, bias=definition.bias, parts=parts
    )

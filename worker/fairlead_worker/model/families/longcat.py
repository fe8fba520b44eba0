"""LongCat-Flash (Meituan 2025): two attentions and MLPs in a layer, beside experts that read what the first MLP reads."""

from typing import Any

import torch
from torch import nn

from fairlead_worker.kernels.base import StepContext
from fairlead_worker.model.decoder import add_norm, make_attention, make_mlp
from fairlead_worker.model.definition import Definition
from fairlead_worker.model.families.deepseek import define_latent
from fairlead_worker.model.families.experts import make_experts
from fairlead_worker.model.layers.rotary import StepRotation


class LongcatLayer(nn.Module):
    """Implements what `Body` needs of a `DecoderLayer`."""

    def __init__(self, definition: Definition, index: int) -> None:
        super().__init__()
        self.definition, self.rope = definition, definition.ropes[index]
        self.mlp = make_experts(definition.config)(index)
        self.self_attn = nn.ModuleList(make_attention(definition, index, 2 * index + part) for part in range(2))
        self.mlps = nn.ModuleList(make_mlp(definition) for _ in range(2))
        self.input_layernorm = nn.ModuleList(definition.make_norm(definition.width) for _ in range(2))
        self.post_attention_layernorm = nn.ModuleList(definition.make_norm(definition.width) for _ in range(2))

    def norm_of(self, _: str) -> nn.Module:
        """Return the norm that begins the layer."""
        return self.input_layernorm[0]

    def forward(
        self, normed: torch.Tensor, residual: torch.Tensor, rotation: StepRotation, context: StepContext, following: nn.Module | None
    ) -> torch.Tensor:
        """As `DecoderLayer.forward`."""
        states = add_norm(self.self_attn[0](normed, rotation, context), residual, self.post_attention_layernorm[0])
        experts: torch.Tensor = self.mlp(states[None])[0]
        states = add_norm(self.mlps[0](states), residual, self.input_layernorm[1])
        states = add_norm(self.self_attn[1](states, rotation, context), residual, self.post_attention_layernorm[1])
        return add_norm(self.mlps[1](states) + experts, residual, following)


def longcat_flash(config: Any) -> Definition | None:
    """Queries and latents have a factor each."""
    layers = config.num_layers
    return define_latent(
        config,
        query_scale=(config.hidden_size / config.q_lora_rank) ** 0.5,
        kv_scale=(config.hidden_size / config.kv_lora_rank) ** 0.5,
        interleaved=True,
        windows=(None,) * layers,
        ropes=("",) * layers,
        make_layer=LongcatLayer,
    )

"""Gemma 4 (Gemma Team 2026): layers that see all tokens have other heads; some models have experts beside the MLPs."""

from importlib import import_module
from typing import Any

import torch
from torch import nn

from fairlead_worker.kernels.base import StepContext
from fairlead_worker.model.definition import Definition
from fairlead_worker.model.families.gemma_shared import GemmaLayer, define_gemma, sharing_modes
from fairlead_worker.model.layers.mlp import GatedMlp
from fairlead_worker.model.layers.rotary import StepRotation
from fairlead_worker.model.layers.sharing import SharedKv


class Gemma4Layer(GemmaLayer):
    """With experts beside the MLP in some models."""

    def __init__(self, definition: Definition, index: int) -> None:
        super().__init__(definition, index)
        config = definition.config
        self.layer_scalar = nn.Buffer(torch.ones(1))
        self.has_experts = bool(getattr(config, "enable_moe_block", False))
        if self.has_experts:
            module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
            self.router, self.experts = module.Gemma4TextRouter(config), module.Gemma4TextExperts(config)
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2, self.pre_feedforward_layernorm_2 = (
                definition.make_norm(definition.width) for _ in range(3)
            )

    def make_mlp(self, config: Any, index: int) -> nn.Module:
        wide = getattr(config, "use_double_wide_mlp", False) and sharing_modes(config)[index] == "reuse"
        return GatedMlp(config.hidden_size, config.intermediate_size * (1 + wide), config.hidden_activation)

    def forward(
        self, states: torch.Tensor, own: torch.Tensor | None, rotation: StepRotation, context: StepContext, shared: SharedKv
    ) -> torch.Tensor:
        """Return [T, width] for states [T, width]."""
        mixed = self.self_attn.attend(self.input_layernorm(states), rotation, context, shared)
        states = states + self.post_attention_layernorm(mixed)
        out = self.mlp(self.pre_feedforward_layernorm(states))
        if self.has_experts:
            _, weights, index = self.router(states)
            routed = self.experts(self.pre_feedforward_layernorm_2(states), index, weights)
            out = self.post_feedforward_layernorm_1(out) + self.post_feedforward_layernorm_2(routed)
        states = states + self.post_feedforward_layernorm(out)
        if own is not None:
            states = states + self.add_own(states, own)
        return states * self.layer_scalar


def gemma4(config: Any) -> Definition | None:
    """Layers that see all tokens have other heads, and may have keys that are values too."""
    config.allow_global_per_layer_attribute_access = True  # of heads: `_make_attention` reads those of each layer
    rope = config.rope_parameters["full_attention"]
    if rope["rope_type"] == "default" or config.use_bidirectional_attention == "all":
        return None  # the frequencies would be of smaller heads; or it is an encoder
    return define_gemma(config, Gemma4Layer)

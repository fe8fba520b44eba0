"""Gemma 3n (Gemma Team 2025): a token has several states, of which a layer computes one."""

from typing import Any

import torch
from torch import nn

from fairlead_worker.kernels.base import StepContext
from fairlead_worker.model.definition import Definition
from fairlead_worker.model.families.gemma_shared import GemmaLayer, define_gemma
from fairlead_worker.model.layers.altup import AltUp, Laurel, SparseMlp
from fairlead_worker.model.layers.mlp import GatedMlp
from fairlead_worker.model.layers.rotary import StepRotation
from fairlead_worker.model.layers.sharing import SharedKv


class Gemma3nLayer(GemmaLayer):
    """States [inputs, T, width] by alternating updates."""

    def __init__(self, definition: Definition, index: int) -> None:
        super().__init__(definition, index)
        config, width = definition.config, definition.width
        self.altup = AltUp(width, config.altup_num_inputs, config.altup_active_idx, config.rms_norm_eps)
        self.laurel = Laurel(width, config.laurel_rank, config.rms_norm_eps)
        self.scales = config.altup_correct_scale

    def make_mlp(self, config: Any, index: int) -> nn.Module:
        inner, sparsity = config.intermediate_size[index], config.activation_sparsity_pattern[index]
        if sparsity > 0:
            return SparseMlp(config.hidden_size, inner, config.hidden_activation, sparsity)
        return GatedMlp(config.hidden_size, inner, config.hidden_activation)

    def forward(
        self, states: torch.Tensor, own: torch.Tensor, rotation: StepRotation, context: StepContext, shared: SharedKv
    ) -> torch.Tensor:
        """Return [inputs, T, width] for states of this shape."""
        predictions = self.altup.predict(states)
        active = predictions[self.altup.active]
        normed = self.input_layernorm(active)
        mixed = self.post_attention_layernorm(self.self_attn.attend(normed, rotation, context, shared))
        active = (active + mixed + self.laurel(normed)) * 2**-0.5
        active = active + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(active)))
        states = self.altup.correct(predictions, active)
        first = states[self.altup.active]
        states[1:] += self.add_own(first * self.altup.correct_output_scale if self.scales else first, own)
        return states


def gemma3n(config: Any) -> Definition:
    return define_gemma(config, Gemma3nLayer)

"""Llama 4 (Meta 2025): three layers that attend within chunks for each one without positions that attends to all tokens.

The router's score is a factor of an expert's input, not of its output.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.integrations import use_experts_implementation
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from fairlead_worker.model.definition import Definition
from fairlead_worker.model.layers.mlp import GatedMlp
from fairlead_worker.model.layers.norm import RmsNorm
from fairlead_worker.model.layers.rotary import QueryGrowth


@use_experts_implementation(is_transposed=True)
class Llama4Experts(Llama4TextExperts):  # type: ignore[misc]  # transformers is not typed
    """transformers' weights, of which a token takes only the experts that it chose."""

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return [T, width] for states [T, width], their experts [T, choices] and the weights of these."""
        out = torch.zeros_like(hidden_states)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            token, choice = (top_k_index == expert).nonzero(as_tuple=True)
            gate, up = (hidden_states[token] @ self.gate_up_proj[expert]).chunk(2, -1)
            answers = (self.act_fn(gate) * up) @ self.down_proj[expert]
            out.index_add_(0, token, answers * top_k_weights[token, choice, None])
        return out


class Llama4Router(nn.Linear):
    """Chooses experts for a token, with scores that are independent of each other."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.num_local_experts, bias=False)
        self.choices = config.num_experts_per_tok

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Return scores and experts, [T, choices] each, of states [T, width]."""
        scores, experts = super().forward(states).topk(self.choices, -1)
        return scores.float().sigmoid().to(states.dtype), experts


class Llama4Moe(nn.Module):
    """Experts beside an MLP that all tokens take."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router = Llama4Router(config)
        self.experts = Llama4Experts(config)
        self.shared_expert = GatedMlp(config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return [1, T, width] for states [1, T, width]."""
        states = states[0]
        scores, experts = self.router(states)
        scaled = (states[:, None] * scores[..., None]).flatten(0, 1)
        routed: torch.Tensor = self.experts(scaled, experts.view(-1, 1), torch.ones_like(scaled[:, :1]))
        out: torch.Tensor = self.shared_expert(states) + routed.view(*experts.shape, -1).sum(1)
        return out[None]


def llama4(config: Any) -> Definition:
    positions = config.no_rope_layers
    chunk = config.attention_chunk_size
    growth = QueryGrowth(config.attn_scale, int(config.floor_scale), 1) if config.attn_temperature_tuning else None

    def make_mlp(layer: int) -> nn.Module:
        if layer in config.moe_layers:
            return Llama4Moe(config)
        return GatedMlp(config.hidden_size, config.intermediate_size_mlp, config.hidden_act)

    return Definition.read(
        config,
        chunks=tuple(chunk if kind == "chunked_attention" else None for kind in config.layer_types),
        ropes=tuple("" if has_positions else None for has_positions in positions),
        interleaved=True,
        head_norms="each" if config.use_qk_norm else "none",
        make_head_norm=partial(RmsNorm, eps=config.rms_norm_eps, weight=False),
        rotates_first=True,
        plain_growth=growth,
        mlp_name="feed_forward",
        make_mlp=make_mlp,
    )

"""Nemotron (NVIDIA 2024), and Nemotron-H (2025) with layers of one part each."""

from functools import partial
from typing import Any

from torch import nn

from fairlead_worker.model.definition import Definition, NormNames, Recurrence
from fairlead_worker.model.families.experts import make_experts
from fairlead_worker.model.families.mamba import make_shape
from fairlead_worker.model.layers.mamba2 import Mamba2
from fairlead_worker.model.layers.mlp import PlainMlp
from fairlead_worker.model.layers.norm import LayerNorm, RmsNorm


def nemotron(config: Any) -> Definition:
    """Layer norms by weight + 1, and a squared ReLU without a gate."""
    return Definition.read(
        config,
        make_norm=partial(LayerNorm, eps=config.norm_eps, plus_one=True),
        partial_rope=True,
        plain_mlp=("up_proj", "down_proj"),
    )


def nemotron_h(config: Any) -> Definition | None:
    """One part in each layer: Mamba 2, attention without positions, an MLP without a gate, or experts (NVIDIA 2025)."""
    kinds = config.layers_block_type
    shape = make_shape(config, config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size, (config.time_step_min, float("inf")))
    experts = make_experts(config, "mixer") if "moe" in kinds else None

    def make_mlp(layer: int) -> nn.Module | None:
        if kinds[layer] == "moe" and experts is not None:
            return experts(layer)
        if kinds[layer] != "mlp":
            return None
        return PlainMlp(config.hidden_size, config.intermediate_size, config.mlp_hidden_act, config.mlp_bias, ("up_proj", "down_proj"))

    return Definition.read(
        config,
        activation=config.mlp_hidden_act,
        make_norm=partial(RmsNorm, eps=config.layer_norm_epsilon),
        norms=NormNames(before_attention="norm"),
        embedding_name="embeddings",
        norm_name="norm_f",
        attention_name="mixer",
        mlp_name="mixer",
        bias=False,
        output_bias=False,
        make_mlp=make_mlp,
        ropes=(None,) * len(kinds),
        attends=tuple(kind == "full_attention" for kind in kinds),
        recurrence=Recurrence("mixer", tuple(kind == "linear_attention" for kind in kinds), lambda _, index: Mamba2(shape, index)),
    )

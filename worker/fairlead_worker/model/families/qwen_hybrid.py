"""Qwen3-Next and Qwen3.5 (Qwen Team 2025, 2026): three layers with the gated delta rule for each one with attention.

The heads of attention are gated.
"""

from functools import partial
from typing import Any

from fairlead_worker.model.decoder import Definition, Recurrence
from fairlead_worker.model.families.experts import make_experts
from fairlead_worker.model.layers.delta import DeltaShape, GatedDelta, JoinedDelta, SplitDelta
from fairlead_worker.model.layers.norm import RmsNorm


def qwen3_next(config: Any) -> Definition:
    return _hybrid(config, JoinedDelta, make_mlp=make_experts(config))


def qwen3_5(config: Any) -> Definition:
    return _hybrid(config, SplitDelta)


def qwen3_5_moe(config: Any) -> Definition:
    return _hybrid(config, SplitDelta, make_mlp=make_experts(config))


def _hybrid(config: Any, kind: type[GatedDelta], **different: Any) -> Definition:
    shape = DeltaShape(
        config.hidden_size,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        config.rms_norm_eps,
    )
    layers = tuple(each == "linear_attention" for each in config.layer_types)
    return Definition.read(
        config,
        **{
            "make_norm": partial(RmsNorm, eps=config.rms_norm_eps, plus_one=True),
            "head_norms": "each",
            "gated": True,
            "partial_rope": True,
            "recurrence": Recurrence("linear_attn", layers, lambda _, index: kind(shape, index)),
            **different,
        },
    )

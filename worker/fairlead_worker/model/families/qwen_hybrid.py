"""Qwen3-Next and Qwen3.5 (Qwen Team 2025, 2026) and OLMo Hybrid (Ai2 2026): three layers with the gated delta rule for each one with
attention. The heads of Qwen's attention are gated.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from fairlead_worker.model.decoder import DecoderLayer
from fairlead_worker.model.definition import AFTER, BEFORE, Definition, Recurrence
from fairlead_worker.model.families.experts import make_experts
from fairlead_worker.model.layers.delta import DeltaShape, GatedDelta, JoinedDelta, NamedDelta, SplitDelta
from fairlead_worker.model.layers.norm import RmsNorm


def qwen3_next(config: Any) -> Definition:
    return _hybrid(config, JoinedDelta, make_mlp=make_experts(config))


def qwen3_5(config: Any) -> Definition:
    return _hybrid(config, SplitDelta)


def qwen3_5_moe(config: Any) -> Definition:
    return _hybrid(config, SplitDelta, make_mlp=make_experts(config))


def olmo_hybrid(config: Any) -> Definition:
    """Norms after attention as in OLMo 3, and before recurrent layers and their MLPs; often without positions."""
    has_rope = (config.rope_parameters or {}).get("rope_theta") is not None

    def make_layer(definition: Definition, index: int) -> DecoderLayer:
        return DecoderLayer(replace(definition, norms=BEFORE if definition.is_recurrent(index) else AFTER), index)

    return Definition.read(
        config,
        head_norms="all",
        ropes=("" if has_rope else None,) * config.num_hidden_layers,
        recurrence=_recurrence(config, NamedDelta, eps=1e-5, correction=2.0 if config.linear_allow_neg_eigval else 1.0),
        make_layer=make_layer,
    )


def _hybrid(config: Any, kind: type[GatedDelta], **different: Any) -> Definition:
    return Definition.read(
        config,
        make_norm=partial(RmsNorm, eps=config.rms_norm_eps, plus_one=True),
        head_norms="each",
        gated=True,
        partial_rope=True,
        recurrence=_recurrence(config, kind, config.rms_norm_eps),
        **different,
    )


def _recurrence(config: Any, kind: type[GatedDelta], eps: float, correction: float = 1.0) -> Recurrence:
    shape = DeltaShape(
        config.hidden_size,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        eps,
        correction,
    )
    layers = tuple(each == "linear_attention" for each in config.layer_types)
    return Recurrence("linear_attn", layers, lambda _, index: kind(shape, index))

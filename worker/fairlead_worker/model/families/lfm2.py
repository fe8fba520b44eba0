"""LFM2 (Liquid AI 2025): short convolutions in most layers, attention in some; with experts after the first layers, too."""

from functools import partial
from typing import Any

from torch import nn

from fairlead_worker.model.definition import Definition, NormNames, Recurrence
from fairlead_worker.model.families.experts import make_experts
from fairlead_worker.model.layers.causal import AttentionNames
from fairlead_worker.model.layers.mlp import GatedMlp, MlpNames
from fairlead_worker.model.layers.norm import RmsNorm
from fairlead_worker.model.layers.short_convolution import ShortConvolution

NAMES = MlpNames("w1", "w3", "w2")


def lfm2(config: Any) -> Definition:
    inner = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        inner, unit = int(2 * inner / 3), config.block_multiple_of
        if config.block_ffn_dim_multiplier is not None:
            inner = -(-int(config.block_ffn_dim_multiplier * inner) // unit) * unit
    return _lfm2(config, lambda _: GatedMlp(config.hidden_size, inner, "silu", names=NAMES))


def lfm2_moe(config: Any) -> Definition:
    experts, dense = make_experts(config, "feed_forward"), config.num_dense_layers
    inner = config.intermediate_size
    return _lfm2(config, lambda layer: GatedMlp(config.hidden_size, inner, "silu", names=NAMES) if layer < dense else experts(layer))


def _lfm2(config: Any, make_mlp: Any) -> Definition:
    def make(_: int, index: int) -> nn.Module:
        return ShortConvolution(config.hidden_size, config.conv_L_cache, config.conv_bias, index)

    return Definition.read(
        config,
        activation="silu",
        make_norm=partial(RmsNorm, eps=config.norm_eps),
        norms=NormNames(before_attention="operator_norm", before_mlp="ffn_norm"),
        norm_name="embedding_norm",
        head_norms="each",
        attention_names=AttentionNames("out_proj", "q_layernorm", "k_layernorm"),
        recurrence=Recurrence("conv", tuple(kind == "conv" for kind in config.layer_types), make),
        make_mlp=make_mlp,
        mlp_name="feed_forward",
    )

"""Decoders with Mamba layers (Gu and Dao 2023): alone, or in Jamba beside layers with attention."""

from functools import partial
from typing import Any

from fairlead_worker.model.definition import Definition, NormNames, Recurrence
from fairlead_worker.model.families.experts import make_experts
from fairlead_worker.model.layers.mamba1 import Mamba1
from fairlead_worker.model.layers.norm import RmsNorm


def mamba(config: Any, make_norm: Any = None) -> Definition:
    make = partial(
        Mamba1,
        config.hidden_size,
        config.intermediate_size,
        config.state_size,
        int(config.time_step_rank),
        config.conv_kernel,
        bias=config.use_bias,
        convolution_bias=config.use_conv_bias,
        make_norm=make_norm,
    )
    return Definition.without_attention(
        config,
        make_norm=partial(RmsNorm, eps=config.layer_norm_epsilon),
        norms=NormNames(before_attention="norm"),
        embedding_name="embeddings",
        norm_name="norm_f",
        wide_residual=config.residual_in_fp32,
        recurrence=Recurrence("mixer", (True,) * config.num_hidden_layers, lambda _, index: make(index)),
    )


def falcon_mamba(config: Any) -> Definition:
    """Norms without weights of steps, B and C (Zuo et al. 2024)."""
    return mamba(config, partial(RmsNorm, eps=config.mixer_rms_eps, weight=False))


def jamba(config: Any) -> Definition:
    """No positions; experts in some layers (Lieber et al. 2024)."""
    make = partial(
        Mamba1,
        config.hidden_size,
        config.mamba_expand * config.hidden_size,
        config.mamba_d_state,
        config.mamba_dt_rank,
        config.mamba_d_conv,
        bias=config.mamba_proj_bias,
        convolution_bias=config.mamba_conv_bias,
        make_norm=partial(RmsNorm, eps=config.rms_norm_eps),
    )
    return Definition.read(
        config,
        norms=NormNames(before_attention="input_layernorm", before_mlp="pre_ff_layernorm"),
        norm_name="final_layernorm",
        mlp_name="feed_forward",
        make_mlp=make_experts(config, "feed_forward"),
        bias=False,
        output_bias=False,
        ropes=(None,) * config.num_hidden_layers,
        recurrence=Recurrence("mamba", tuple(kind == "linear_attention" for kind in config.layer_types), lambda _, index: make(index)),
    )

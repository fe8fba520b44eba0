"""Decoders with an embedding of positions: GPT-2 (Radford et al. 2019), OPT (Zhang et al. 2022) and StarCoder (Li et al. 2023)."""

from functools import partial
from typing import Any

from fairlead_worker.model.definition import Definition, NormNames
from fairlead_worker.model.layers.causal import AttentionNames
from fairlead_worker.model.layers.norm import LayerNorm


def gpt2(config: Any, **different: Any) -> Definition | None:
    if config.add_cross_attention:
        return None
    width, heads = config.hidden_size, config.num_attention_heads
    return Definition.read(
        config,
        **{
            "make_norm": partial(LayerNorm, eps=config.layer_norm_epsilon),
            "norms": NormNames(before_attention="ln_1", before_mlp="ln_2"),
            "norm_name": "ln_f",
            "names": {r"(^|\.)h\.": r"\1layers."},
            "embedding_name": "wte",
            "positions_name": "wpe",
            "attention_name": "attn",
            "attention_names": AttentionNames("c_proj", stack="c_attn"),
            "transposed": True,
            "stacked": True,
            "kv_heads": heads,
            "bias": True,
            "output_bias": True,
            "ropes": (None,) * config.num_hidden_layers,
            "scaling": (width // heads) ** -0.5 if config.scale_attn_weights else 1.0,
            "scales_by_layer": getattr(config, "scale_attn_by_inverse_layer_idx", False),
            "activation": config.activation_function,
            "inner": config.n_inner or 4 * width,
            "mlp_bias": True,
            "plain_mlp": ("c_fc", "c_proj"),
            **different,
        },
    )


def gpt_bigcode(config: Any) -> Definition | None:
    """One head of keys and values."""
    heads = config.num_attention_heads
    return gpt2(config, kv_heads=1 if config.multi_query else heads, by_head=not config.multi_query, transposed=False)


def opt(config: Any) -> Definition | None:
    """Positions begin at the third row of their embedding."""
    biased = config.enable_bias
    if not config.do_layer_norm_before or config._remove_final_layer_norm or config.word_embed_proj_dim != config.hidden_size:
        return None
    affine = config.layer_norm_elementwise_affine
    return Definition.read(
        config,
        make_norm=partial(LayerNorm, eps=1e-5, weight=affine, bias=affine),
        norms=NormNames(before_attention="self_attn_layer_norm", before_mlp="final_layer_norm"),
        norm_name="final_layer_norm",
        names={r"(^|\.)decoder\.": r"\1", r"\.(fc[12])(\.|$)": r".mlp.\1\2"},
        positions_name="embed_positions",
        first_position=2,
        attention_names=AttentionNames("out_proj"),
        kv_heads=config.num_attention_heads,
        bias=biased,
        output_bias=biased,
        ropes=(None,) * config.num_hidden_layers,
        activation=config.activation_function,
        inner=config.ffn_dim,
        mlp_bias=biased,
        plain_mlp=("fc1", "fc2"),
    )

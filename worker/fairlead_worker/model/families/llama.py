"""Llama (Touvron et al. 2023) and decoders that differ from it in biases, windows, norms of heads or the order of their norms."""

from dataclasses import replace
from functools import partial
from typing import Any

from fairlead_worker.model.definition import AFTER, Definition, NormNames, windows_of
from fairlead_worker.model.layers.causal import AttentionNames
from fairlead_worker.model.layers.norm import LayerNorm, RmsNorm
from fairlead_worker.model.layers.rotary import QueryGrowth


def llama(config: Any) -> Definition:
    return Definition.read(config)


def cwm(config: Any) -> Definition:
    return Definition.read(config, windows=windows_of(config))


def mistral(config: Any) -> Definition:
    return Definition.read(config, windows=windows_of(config), bias=False, output_bias=False, mlp_bias=False)


def ministral3(config: Any) -> Definition:
    """Queries grow beyond the original context."""
    rope = config.rope_parameters
    if not (factor := rope.get("llama_4_scaling_beta")):
        return mistral(config)
    return replace(mistral(config), growth=QueryGrowth(factor, rope["original_max_position_embeddings"]))


def qwen2(config: Any) -> Definition:
    return Definition.read(config, windows=windows_of(config), bias=True, output_bias=False)


def qwen3(config: Any) -> Definition:
    return Definition.read(config, windows=windows_of(config), head_norms="each")


def seed_oss(config: Any) -> Definition:
    return Definition.read(config, output_bias=config.attention_out_bias)


def smollm3(config: Any) -> Definition:
    """Every fourth layer has no positions (Yang et al. 2025).

    Layers of the type `sliding_attention` have the window without `use_sliding_window` too, as in the masks of transformers.
    """
    return Definition.read(config, windows=windows_of(config), ropes=tuple("" if has_rope else None for has_rope in config.no_rope_layers))


def ernie(config: Any, **different: Any) -> Definition:
    biased = config.use_bias
    return Definition.read(config, bias=biased, output_bias=biased, mlp_bias=biased, interleaved=True, **different)


def phi3(config: Any) -> Definition:
    return Definition.read(config, windows=windows_of(config), stacked=True, partial_rope=True)


def exaone4(config: Any, **different: Any) -> Definition:
    """Norms after the sublayers; layers that see all tokens have no positions, if others have windows."""
    windows = windows_of(config)
    hybrid = config.sliding_window is not None
    return Definition.read(
        config,
        windows=windows,
        ropes=tuple("" if window or not hybrid else None for window in windows),
        head_norms="each",
        bias=False,
        output_bias=False,
        **{"norms": AFTER, **different},
    )


def olmo2(config: Any) -> Definition:
    """Norms after the sublayers, and of all queries and all keys (OLMo 2, 2025)."""
    return Definition.read(config, norms=AFTER, head_norms="all")


def olmo3(config: Any) -> Definition:
    return Definition.read(config, norms=AFTER, head_norms="all", windows=windows_of(config), ropes=tuple(config.layer_types))


def arcee(config: Any) -> Definition:
    """A squared ReLU without a gate (AFM)."""
    return Definition.read(config, plain_mlp=("up_proj", "down_proj"))


def nanochat(config: Any) -> Definition:
    """Norms without weights, of the embedding and of rotated heads too, and a squared ReLU without a gate (Karpathy 2025)."""
    return Definition.read(
        config,
        make_norm=partial(RmsNorm, eps=config.rms_norm_eps, weight=False),
        norms_embedding=True,
        head_norms="each",
        rotates_first=True,
        backward=True,
        plain_mlp=("fc1", "fc2"),
        logits_softcap=config.final_logit_softcapping,
    )


def apertus(config: Any) -> Definition:
    """An MLP without a gate, with xIELU (Apertus, 2025)."""
    return Definition.read(
        config,
        norms=NormNames(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
        head_norms="each",
        mlp_bias=False,
        plain_mlp=("up_proj", "down_proj"),
    )


def helium(config: Any) -> Definition:
    """Neighbours are rotated (Kyutai 2025)."""
    return Definition.read(config, output_bias=False, interleaved=True)


def hunyuan(config: Any) -> Definition:
    """Queries and keys are rotated before their norms (Tencent 2025)."""
    return Definition.read(
        config, head_norms="each", rotates_first=True, attention_names=AttentionNames("o_proj", "query_layernorm", "key_layernorm")
    )


def starcoder2(config: Any) -> Definition:
    """Layer norms, and MLPs without a gate (Lozhkov et al. 2024)."""
    biased = config.use_bias
    return Definition.read(
        config,
        windows=windows_of(config),
        make_norm=partial(LayerNorm, eps=config.norm_epsilon),
        bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        plain_mlp=("c_fc", "c_proj"),
    )

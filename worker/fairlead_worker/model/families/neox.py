"""Decoders with layer norms, as GPT-NeoX (Black et al. 2022): Persimmon, Phi, StableLM, OLMo, Jais 2. Most rotate a part of each head."""

from functools import partial
from typing import Any

from fairlead_worker.model.definition import BEFORE, Definition, NormNames
from fairlead_worker.model.layers.causal import AttentionNames
from fairlead_worker.model.layers.norm import LayerNorm

TOGETHER = NormNames(before_attention="input_layernorm")
"""Attention and MLP read one norm."""


def gpt_neox(config: Any, **different: Any) -> Definition:
    """An MLP without a gate, in parallel with attention, after a norm of its own."""
    biased = getattr(config, "attention_bias", True)
    return Definition.read(
        config,
        **{
            "make_norm": partial(LayerNorm, eps=config.layer_norm_eps),
            "parallel": getattr(config, "use_parallel_residual", False),
            "names": {r"^embed_out\.": "lm_head."},
            "embedding_name": "embed_in",
            "norm_name": "final_layer_norm",
            "attention_name": "attention",
            "attention_names": AttentionNames("dense", "q_layernorm", "k_layernorm", "query_key_value"),
            "stacked": True,
            "by_head": True,
            "kv_heads": config.num_attention_heads,
            "bias": biased,
            "output_bias": biased,
            "partial_rope": True,
            "mlp_bias": True,
            "plain_mlp": ("dense_h_to_4h", "dense_4h_to_h"),
            **different,
        },
    )


def persimmon(config: Any) -> Definition:
    """Attention, then the MLP; norms of heads (Adept 2023)."""
    norms = "each" if config.qk_layernorm else "none"
    return gpt_neox(config, embedding_name="embed_tokens", norm_name="final_layernorm", attention_name="self_attn", head_norms=norms)


def jais2(config: Any) -> Definition:
    """A squared ReLU without a gate (Inception 2025)."""
    return Definition.read(config, make_norm=partial(LayerNorm, eps=config.layer_norm_eps), plain_mlp=("up_proj", "down_proj"))


def phi(config: Any) -> Definition:
    """Attention and an MLP without a gate in parallel (Li et al. 2023)."""
    return Definition.read(
        config,
        make_norm=partial(LayerNorm, eps=config.layer_norm_eps),
        norms=TOGETHER,
        norm_name="final_layernorm",
        parallel=True,
        head_norms="each" if config.qk_layernorm else "none",
        attention_names=AttentionNames("dense", "q_layernorm", "k_layernorm"),
        bias=True,
        output_bias=True,
        head_bias=True,
        partial_rope=True,
        mlp_bias=True,
        plain_mlp=("fc1", "fc2"),
    )


def stablelm(config: Any) -> Definition | None:
    """StableLM 2 (Bellagente et al. 2024)."""
    if config.qk_layernorm:  # each head has its own norm
        return None
    parallel = bool(config.use_parallel_residual)
    return Definition.read(
        config,
        make_norm=partial(LayerNorm, eps=config.layer_norm_eps),
        norms=TOGETHER if parallel else BEFORE,
        parallel=parallel,
        bias=config.use_qkv_bias,
        output_bias=False,
        partial_rope=True,
    )


def olmo(config: Any) -> Definition | None:
    """Norms without weights (Groeneveld et al. 2024)."""
    if config.clip_qkv is not None:
        return None
    return Definition.read(config, make_norm=partial(LayerNorm, eps=1e-5, weight=False, bias=False))

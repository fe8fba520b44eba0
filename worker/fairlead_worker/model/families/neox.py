"""Decoders with layer norms, as GPT-NeoX (Black et al. 2022): Phi, StableLM and OLMo. Most rotate a part of each head."""

from functools import partial
from typing import Any

from fairlead_worker.model.definition import BEFORE, Definition, NormNames
from fairlead_worker.model.layers.causal import AttentionNames
from fairlead_worker.model.layers.mlp import PlainMlp
from fairlead_worker.model.layers.norm import LayerNorm

TOGETHER = NormNames(before_attention="input_layernorm")
"""Attention and MLP read one norm."""


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
        make_mlp=lambda _: PlainMlp(config.hidden_size, config.intermediate_size, config.hidden_act, True, ("fc1", "fc2")),
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

"""DeepSeek V2 and V3 (DeepSeek-AI 2024), and decoders with its attention over latents: Kimi K2, GLM-4.7-Flash, A.X K1, Youtu, MiniCPM 3."""

from math import log
from typing import Any

from fairlead_worker.model.definition import Definition, Recurrence
from fairlead_worker.model.families.experts import make_experts
from fairlead_worker.model.layers.delta import DeltaShape
from fairlead_worker.model.layers.kimi_delta import KimiDelta
from fairlead_worker.model.layers.latent import LatentSizes

ALIGNMENT = 4
"""What divides the size of a latent, for the native library."""


def define_latent(config: Any, query_scale: float = 1.0, kv_scale: float = 1.0, **different: Any) -> Definition | None:
    """Return a decoder with attention over latents, but for what is `different`; None: its latents have a size that is not ours.

    query_scale, kv_scale: factors of queries and latents.
    """
    rank = config.kv_lora_rank
    if rank % ALIGNMENT:
        return None
    sizes = LatentSizes(rank, config.q_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, kv_scale)
    scaling = query_scale * _scaling(getattr(config, "rope_parameters", {}), sizes.query)
    return Definition.read(config, latent=sizes, head_dim=sizes.qk_rope_head_dim, scaling=scaling, **different)


def _scaling(rope: dict[str, Any], head_dim: int) -> float:
    """Return the factor on query times key, which grows with YaRN's (`mscale_all_dim`)."""
    growth, factor = rope.get("mscale_all_dim", 0), rope.get("factor", 1)
    grows = rope.get("rope_type", "default") != "default" and growth and factor > 1
    return float(head_dim**-0.5 * (0.1 * growth * log(factor) + 1) ** 2) if grows else float(head_dim) ** -0.5


def deepseek_v2(config: Any) -> Definition | None:
    return define_latent(config, interleaved=True, make_mlp=make_experts(config))


def deepseek_v3(config: Any) -> Definition | None:
    return define_latent(config, interleaved=config.rope_interleave, make_mlp=make_experts(config))


def kimi_linear(config: Any) -> Definition | None:
    """Latents without positions in some layers, and Kimi delta attention in the others."""
    heads, dim = config.linear_num_heads, config.linear_head_dim
    shape = DeltaShape(config.hidden_size, heads, heads, dim, dim, config.linear_conv_kernel_dim, config.rms_norm_eps)
    layers = tuple(kind == "linear_attention" for kind in config.layer_types)
    return define_latent(
        config,
        ropes=(None,) * len(layers),
        recurrence=Recurrence("self_attn", layers, lambda _, index: KimiDelta(shape, index)),
        make_mlp=make_experts(config),
    )


def youtu(config: Any) -> Definition | None:
    return define_latent(config, interleaved=config.rope_interleave)


def minicpm3(config: Any) -> Definition | None:
    """Factors of embeddings, what is added to the residual, and logits."""
    return define_latent(
        config,
        embedding_scale=config.scale_emb,
        rounds_embedding_scale=True,
        residual_scale=config.scale_depth / config.num_hidden_layers**0.5,
        logits_scale=config.dim_model_base / config.hidden_size,
    )

"""Gemma 1, 2 and 3 (Gemma Team 2024, 2025): norms by weight + 1, scaled embeddings, norms around the sublayers."""

from functools import partial
from typing import Any

from fairlead_worker.model.definition import AROUND, Definition, NormNames, windows_of
from fairlead_worker.model.layers.norm import RmsNorm


def gemma(config: Any, **different: Any) -> Definition | None:
    """None for a config that lets tokens attend to later ones too, as that of EmbeddingGemma: it is not this decoder."""
    if getattr(config, "use_bidirectional_attention", False):
        return None
    return Definition.read(
        config,
        **{
            "make_norm": partial(RmsNorm, eps=config.rms_norm_eps, plus_one=True),
            "embedding_scale": config.hidden_size**0.5,
            "rounds_embedding_scale": True,
            **different,
        },
    )


def gemma2(config: Any, **different: Any) -> Definition | None:
    return gemma(
        config,
        **{
            "activation": config.hidden_activation,
            "norms": AROUND,
            "windows": windows_of(config),
            "scaling": config.query_pre_attn_scalar**-0.5,
            "softcap": config.attn_logit_softcapping,
            "logits_softcap": config.final_logit_softcapping,
            **different,
        },
    )


def vaultgemma(config: Any) -> Definition | None:
    """Norms before the sublayers alone."""
    return gemma2(config, norms=NormNames(before_attention="input_layernorm", before_mlp="pre_feedforward_layernorm"))


def gemma3(config: Any) -> Definition | None:
    """Layers with windows have a rope of their own."""
    return gemma2(config, head_norms="each", ropes=tuple(config.layer_types))

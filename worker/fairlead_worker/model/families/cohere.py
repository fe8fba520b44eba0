"""Command R (Cohere 2024): attention and MLP beside each other, after one layer norm without a bias; neighbours are rotated."""

from functools import partial
from typing import Any

from fairlead_worker.model.definition import Definition, NormNames, windows_of
from fairlead_worker.model.layers.norm import LayerNorm


def cohere(config: Any, **different: Any) -> Definition:
    return Definition.read(
        config,
        make_norm=partial(LayerNorm, eps=config.layer_norm_eps, bias=False),
        norms=NormNames(before_attention="input_layernorm"),
        parallel=True,
        head_norms="own" if getattr(config, "use_qk_norm", False) else "none",
        interleaved=True,
        mlp_bias=False,
        logits_scale=config.logit_scale,
        **different,
    )


def cohere2(config: Any) -> Definition:
    """Layers that see all tokens have no positions."""
    windows = windows_of(config)
    return cohere(config, windows=windows, ropes=tuple("" if window else None for window in windows))

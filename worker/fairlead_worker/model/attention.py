"""Attention functions that transformers models call in place of their own.

Models look functions up by name in transformers' `AttentionInterface` (docs: attention_interface). Without a mask function under the
same name they build no mask. A keyword argument of the model call reaches the function unchanged, which carries the step's context
without global state. Inputs are packed: one "sequence" of T tokens of many requests, with explicit positions.
"""

from typing import Any

import torch
from transformers import AttentionInterface

from fairlead_worker.kernels.base import LayerSpec, StepContext

ATTENTION = "fairlead"
PROBE = "fairlead-probe"


class UnsupportedAttention(Exception):
    """The model's attention needs a feature that paged attention lacks here."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    step: StepContext,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend: query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> [1, T, heads, dim].

    Scaling, window and cap are not read here: they are constants of the layer, and the backend has them from the probe.
    """
    output = step.attend(module.layer_idx, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))  # type: ignore[arg-type]  # layer_idx is an int; torch types module attributes as tensors
    return output[None], None


def probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    *,
    step: dict[int, LayerSpec] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Let a single token attend to itself, and record how the layer calls. Raises UnsupportedAttention."""
    if step is None:
        raise UnsupportedAttention(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttention(f"{type(module).__name__} has no layer_idx")
    if layer in step:
        raise UnsupportedAttention(f"layer {layer} attends twice in one pass")
    if attention_mask is not None:
        raise UnsupportedAttention(f"{type(module).__name__} makes a mask of its own")
    step[layer] = spec = layer_spec(module, query, key, value, layer, kwargs)
    repeated = value.repeat_interleave(spec.heads // spec.kv_heads, 1)
    return repeated.transpose(1, 2), None


def layer_spec(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, kwargs: dict[str, Any]
) -> LayerSpec:
    """Return what `module` needs of attention, from its call. Raises UnsupportedAttention."""
    if kwargs.get("position_bias") is not None:
        raise UnsupportedAttention("position bias (T5 or ALiBi style)")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedAttention("attention that is not causal")
    kind = _layer_kind(module, layer)
    if kind not in ("full_attention", "sliding_attention", None):
        raise UnsupportedAttention(f"layers of type {kind!r}")
    # Of a family that does not pass it (Phi-MoE), the mask of generate() follows the config.
    own = getattr(module, "sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    window = kwargs.get("sliding_window", own)
    scaling = kwargs.get("scaling")
    return LayerSpec(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        scaling=float(scaling) if scaling is not None else float(query.shape[3]) ** -0.5,
        # The mask of generate() follows the layer's type, so the type decides if the two disagree.
        window=None if kind == "full_attention" or not window else int(window),
        softcap=kwargs.get("softcap"),
        sinks=sink_numbers(sinks) if (sinks := kwargs.get("s_aux")) is not None else None,
    )


def sink_numbers(sinks: torch.Tensor) -> tuple[float, ...]:
    """Return the scores of sinks [heads]; zeros of a model without weights."""
    return (0.0,) * len(sinks) if sinks.is_meta else tuple(sinks.float().tolist())


def _layer_kind(module: torch.nn.Module, layer: int) -> str | None:
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    return kinds[layer] if kinds and layer < len(kinds) else None


AttentionInterface.register(ATTENTION, paged_attention)
AttentionInterface.register(PROBE, probe_attention)

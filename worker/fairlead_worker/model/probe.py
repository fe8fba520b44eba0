"""Probe: learn a model's attention layers by running one token through it, instead of reading the configs of a hundred families."""

import inspect

import torch
from transformers import PreTrainedModel

from fairlead_worker.kernels.base import LayerSpec
from fairlead_worker.model.attention import ATTENTION, PROBE, UnsupportedAttention


def probe_layers(model: PreTrainedModel) -> tuple[LayerSpec, ...]:
    """Return the attention layers of `model` in order; leave it set to the paged attention function.

    Raises UnsupportedAttention if a layer does not use transformers' attention interface, or needs an unsupported feature. Recurrent
    layers are detected too: they leave a gap in the layers seen.
    """
    name = type(model).__name__
    if not model.is_backend_compatible():
        raise UnsupportedAttention(f"{name} does not use transformers' attention interface")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedAttention(f"{name} takes no position_ids")
    if chosen := getattr(model.config.get_text_config(decoder=True), "index_topk", None):
        raise UnsupportedAttention(f"{name} attends to {chosen} tokens that an indexer chooses (index_topk)")
    model.set_attn_implementation(PROBE)
    seen: dict[int, LayerSpec] = {}
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            model(input_ids=token, position_ids=token, use_cache=False, step=seen)
    except UnsupportedAttention:
        raise
    except Exception as cause:
        raise UnsupportedAttention(f"{name} did not run with a replaced attention function: {cause}") from cause
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    if sorted(seen) != list(range(expected)):
        found = f"{len(seen)} of {expected} layers use attention"
        raise UnsupportedAttention(f"{name}: {found}; recurrent layers without a definition of our own are not served")
    model.set_attn_implementation(ATTENTION)
    return tuple(seen[layer] for layer in range(expected))

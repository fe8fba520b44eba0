"""What a decoder has beyond plain causal attention and an MLP, in words."""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedConfig

from fairlead_worker.kernels.base import LayerSpec
from fairlead_worker.model.formats.base import count_experts


def describe_mechanisms(config: PreTrainedConfig, layers: Sequence[LayerSpec], recurs: bool = False) -> str:
    """Return the mechanisms of a decoder with commas, by its config and by its attention layers as the probe saw them.

    recurs: whether it has recurrent layers.
    """
    found = _mechanisms(config.get_text_config(decoder=True), layers)
    return ", ".join(["recurrent states", *found] if recurs else found)


def _mechanisms(text: PreTrainedConfig, layers: Sequence[LayerSpec]) -> Iterator[str]:
    windowed = sum(layer.window is not None for layer in layers)
    if windowed:
        yield "windows" if windowed == len(layers) else "windows and full attention"
    if any(layer.chunk is not None for layer in layers):
        yield "chunked and full attention"
    if any(layer.softcap for layer in layers):
        yield "soft-capped scores"
    if any(layer.sinks is not None for layer in layers):
        yield "attention sinks"
    if any(layer.value_in_key for layer in layers):
        yield "latents"
    elif getattr(text, "kv_lora_rank", None):
        yield "latents, cached as keys and values"
    elif any(layer.key_dim != layer.value_dim for layer in layers):
        yield "values narrower than keys" if layers[0].value_dim < layers[0].key_dim else "values wider than keys"
    if len({(layer.kv_heads, layer.key_dim) for layer in layers}) > 1:
        yield "layers with other heads"
    if any(count_experts(part) or getattr(part, "moe_num_experts", None) for part in (text, getattr(text, "ffn_config", None))):
        yield "experts"
    yield from sorted({kind if kind.endswith("rope") else f"{kind} rope" for kind in _rope_types(text)} - {"default rope"})
    if getattr(text, "final_logit_softcapping", None):
        yield "soft-capped logits"
    if text.tie_word_embeddings:
        yield "tied head"


def _rope_types(text: PreTrainedConfig) -> Iterator[str]:
    parameters = getattr(text, "rope_parameters", None) or {}
    for rope in (parameters, *(each for each in parameters.values() if isinstance(each, dict))):
        if isinstance(kind := rope.get("rope_type"), str):
            yield kind

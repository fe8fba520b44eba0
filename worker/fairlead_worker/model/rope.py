"""Context length of a model, and rotary embeddings whose frequencies depend on the text length.

Most rope scalings (linear, yarn, llama3) are the same for every text. Two are not: transformers chooses the frequencies of `dynamic`
by the longest text that it sees, and those of `longrope` by whether that text exceeds the original context. A step holds texts of
many lengths, and cached KV serves texts of other lengths than the one it was computed for. Both need the same frequencies for all
texts.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fairlead_worker.errors import ModelLoadError

logger = logging.getLogger(__name__)

ENDLESS = 1 << 20
"""Tokens that a model without positions and attention serves: its states take the same memory whatever the length."""
LONG = "up to %d tokens: all texts are served with the long frequencies of longrope, those below %d too"


def max_model_len(uri: str, config: PreTrainedConfig, wanted: int) -> int:
    """Return the limit on tokens of prompt and output. `wanted`: 0 for the model's own limit, at which its frequencies would begin to
    change.

    Raises ModelLoadError for an impossible limit.
    """
    text = config.get_text_config(decoder=True)
    own = getattr(text, "max_position_embeddings", None)
    if own is None and not getattr(text, "num_attention_heads", None):
        own = ENDLESS
    if own is None or own < 1:
        given = "no max_position_embeddings (nor n_positions)" if own is None else f"max_position_embeddings (or n_positions) {own}"
        raise ModelLoadError(uri, f"its config has {given}: the context length is unknown")
    if wanted > own:
        raise ModelLoadError(uri, f"--max-model-len {wanted} is more than the model's {own}")
    steady = min([int(own), *(_original(text, rope) for rope in _changing(text))])
    if wanted > steady and any(rope["rope_type"] == "dynamic" for rope in _changing(text)):
        raise ModelLoadError(
            uri,
            f"--max-model-len {wanted}: beyond {steady} tokens its rope (dynamic NTK) has other frequencies for each length, so that "
            f"requests could share neither a step nor cached KV; at most {steady}, or give its config a rope_type yarn or linear",
        )
    if not wanted and steady < own:
        logger.warning(
            "%s serves %d tokens of the %d that its config names: beyond, the frequencies of its rope change with the length of a text; "
            "for longrope, --max-model-len up to %d serves all texts with the long ones",
            uri, steady, own, own,
        )  # fmt: skip
    return wanted or steady


def fix_alpha(config: PreTrainedConfig) -> None:
    """Give HunYuan's fixed stretch of the base its plain name, in place: its configs call it `dynamic`, and give an `alpha`.

    The new base is as transformers computes it (`compute_ntk_alpha_rope_parameters`). Other families ignore an `alpha`.
    """
    own: Any = config
    rope = getattr(own, "rope_parameters", None) or {}
    if own.model_type in ("hunyuan_v1_dense", "hunyuan_v1_moe") and rope.get("rope_type") == "dynamic" and (alpha := rope.get("alpha")):
        size = own.head_dim or own.hidden_size // own.num_attention_heads
        own.rope_parameters = {"rope_type": "default", "rope_theta": rope["rope_theta"] * alpha ** (size / (size - 2))}


def fix_long_rope(model: PreTrainedModel, limit: int) -> None:
    """Use longrope's long frequencies for all texts if texts may exceed the original context; transformers uses them for such texts.

    Results of shorter texts then differ from transformers (as with vLLM), because a text may grow, and may share KV with longer ones.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope":
            continue
        config: Any = module.config
        original = _original(config, config.rope_parameters)
        if limit <= original:
            continue
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, model.device, seq_len=original + 1)
        module.register_buffer("inv_freq", frequencies, persistent=False)
        module.rope_type = "default"  # disables transformers' choice by length
        logger.warning(LONG, limit, original)


def find_frequencies(config: Any, kind: str, head_dim: int, partial: bool, limit: int) -> tuple[torch.Tensor, float]:
    """Return the frequencies [half] float32 of a rope, and the factor of its cosines and sines, as transformers computes them.

    kind: the key of its settings in `rope_parameters`; empty: they are the only ones. partial: whether the family reads a
    `partial_rotary_factor` there. limit: tokens of the longest text, which decides for longrope as in `fix_long_rope`.
    """
    rope = config.rope_parameters[kind] if kind else config.rope_parameters
    name = rope.get("rope_type", "default")
    if name == "default":
        rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0)) if partial else head_dim
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated), 1.0
    named: dict[str, Any] = {"layer_type": kind} if kind else {}
    if name == "longrope" and limit > (original := _original(config, rope)):
        named["seq_len"] = original + 1
        logger.warning(LONG, limit, original)
    frequencies, scale = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), **named)
    return frequencies.float(), float(scale)


def _changing(text: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield the model's rope settings whose frequencies depend on the length."""
    parameters = getattr(text, "rope_parameters", None) or {}
    for rope in (parameters, *(nested for nested in parameters.values() if isinstance(nested, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            yield rope


def _original(text: PreTrainedConfig, rope: dict[str, Any]) -> int:
    own = text.max_position_embeddings
    return int(rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", own))

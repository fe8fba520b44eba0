"""Text parts of models that also read images or sound: such a model's decoder is served as the plain model that it is.

The wrapper's config holds the config of its text part, and its checkpoint has the text part's tensors behind a prefix. Tensors of other
parts are not read.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

PLAIN: Final = {
    "kimi_k2": "deepseek_v3",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""The model type of a text part → that of the equal plain decoder. Qwen's parts have three rotary positions for each token of an image, and
for a text they are equal."""
WRAPPERS: Final = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k2": "kimi_k2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
    "voxtral": "llama",
}
"""Model types of known wrappers → the type of a text part whose config does not name it. tests/worker/model/test_wrappers.py has each."""
_OF_WHOLE: Final = ("dtype", "torch_dtype", "quantization_config", "eos_token_id", "bos_token_id", "pad_token_id")
_PREFIX: Final = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(lm_head\.)?")
_OTHER: Final = re.compile(
    r"(?:model\.)?(?:visual|vision_\w+|image_\w+|audio_\w+|multi_modal_projector|connector|embed_vision|embed_audio)(?:\.|$)"
)


def text_config(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config.json of the text part of a wrapper; None for any other model."""
    kind = raw.get("model_type")
    if kind not in WRAPPERS:
        return None
    inner = raw.get("text_config")
    config = dict(inner) if isinstance(inner, Mapping) else {name: value for name, value in raw.items() if name != "vision_config"}
    config |= {name: raw[name] for name in _OF_WHOLE if raw.get(name) is not None and name not in config}
    named = config.get("model_type") or WRAPPERS[kind]
    if named == "qwen3_vl_moe_text":
        config["norm_topk_prob"] = True  # it always divides the experts' weights by their sum
    config["model_type"] = PLAIN.get(WRAPPERS[kind] if named == kind else named, named)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := config.get(name), Mapping) and "mrope_section" in rope:
            config[name] = _without_sections(rope)
    return config


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Return the text part's tensors among those of a checkpoint: the name in the file → the name in the plain model."""
    kept = [name for name in names if not _OTHER.match(name)]
    return {name: f"{match[1] or 'model.'}{name[match.end() :]}" if (match := _PREFIX.match(name)) else name for name in kept}


def _without_sections(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return rotary parameters without the sections of an image's positions. `mrope` is the default rope but for them."""
    plain = {name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")}
    for name in ("type", "rope_type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return None if set(plain) <= {"type", "rope_type"} and plain.get("rope_type", plain.get("type")) == "default" else plain

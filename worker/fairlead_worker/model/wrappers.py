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
"""Model type → that of the equal plain decoder. Qwen's text parts have three rotary positions for each token of an image, and for a text
they are equal."""
WRAPPERS: Final = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
    "voxtral": "llama",
}
"""Model types of known wrappers → the type of a text part whose config does not name it."""
_OF_WHOLE: Final = ("dtype", "torch_dtype", "quantization_config", "eos_token_id", "bos_token_id", "pad_token_id")
_PREFIX: Final = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
_OTHER: Final = re.compile(
    r"(?:model\.)?(?:visual|vision_\w+|image_\w+|audio_\w+|multi_modal_projector|connector|embed_vision|embed_audio)(?:\.|$)"
)


def plain_config(raw: Mapping[str, Any]) -> tuple[dict[str, Any], bool] | None:
    """Return the config.json of the plain decoder that a model is, and whether that is its text part; None: `raw` is its own.

    Raises ValueError for names of modules that cannot be translated.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or (kind not in WRAPPERS and kind not in PLAIN):
        return None
    if kind not in WRAPPERS:
        return {**raw, "model_type": PLAIN[kind]}, False
    inner = raw.get("text_config")
    config = dict(inner) if isinstance(inner, Mapping) else {name: value for name, value in raw.items() if name != "vision_config"}
    config |= {name: raw[name] for name in _OF_WHOLE if config.get(name) is None and raw.get(name) is not None}
    if config.get("tie_word_embeddings") is not True and raw.get("tie_word_embeddings") is True:
        config["tie_word_embeddings"] = True
    named = config.get("model_type")
    if named is None or named == kind:
        named = WRAPPERS[kind]
    if named == "qwen3_vl_moe_text":
        config["norm_topk_prob"] = True  # it always divides the experts' weights by their sum
    config["model_type"] = PLAIN.get(named, named)
    if (quantization := config.pop("quantization_config", None)) is not None:
        config["quantization_config"] = _translate(quantization)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := config.get(name), Mapping) and "mrope_section" in rope:
            config[name] = _without_sections(rope)
    return config, True


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Return the text part's tensors among those of a checkpoint: the name in the file → the name in the plain model."""
    return {name: _text_name(name) for name in names if not _OTHER.match(name)}


def _text_name(name: str) -> str:
    """Return the plain model's name of a tensor or module of the text part."""
    if (match := _PREFIX.match(name)) is None:
        return name
    rest = name[match.end() :]
    return rest if rest.split(".")[0] == "lm_head" else f"model.{rest}"


def _translate(given: Any, place: str = "quantization_config") -> Any:
    """Return a quantization_config with the plain model's names of modules. Raises ValueError for a pattern with the wrapper's."""
    if isinstance(given, Mapping):
        return {name: _translate(value, f"{place}.{name}") for name, value in given.items()}
    if isinstance(given, list):
        return [_translate(value, place) for value in given]
    if not isinstance(given, str):
        return given
    if given.startswith("re:") and re.search(r"language_model|text_model", given):
        raise ValueError(f"{place} has the pattern {given!r}, with names that its text part alone does not have: list them without re:")
    return _text_name(given)


def _without_sections(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return rotary parameters without the sections of an image's positions. `mrope` is the default rope but for them."""
    plain = {name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")}
    for name in ("type", "rope_type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return None if set(plain) <= {"type", "rope_type"} and plain.get("rope_type", plain.get("type")) == "default" else plain

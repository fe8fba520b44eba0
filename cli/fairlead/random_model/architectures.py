"""Convert a recipe to a transformers config. Nothing is downloaded."""

from typing import Any

from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from fairlead.random_model.recipe import Recipe
from fairlead.random_model.tokenizer import END_OF_TEXT, IM_END, SPECIAL_TOKENS

INITIALIZER_RANGE = 0.2
"""Ten times the usual. With 0.02, or with tied embeddings, a random model repeats its last token forever and tests nothing."""


def build_config(recipe: Recipe) -> PretrainedConfig:
    """Return the transformers config of `recipe`: untied embeddings, wide initial range, our special token ids."""
    if recipe.arch in _PLAIN:
        return _PLAIN[recipe.arch](**_llama_like(recipe))
    return _OTHER[recipe.arch](recipe)


def _shared(recipe: Recipe) -> dict[str, Any]:
    end = SPECIAL_TOKENS.index(END_OF_TEXT)
    return {
        "vocab_size": recipe.vocab,
        "tie_word_embeddings": False,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": end,
        "eos_token_id": SPECIAL_TOKENS.index(IM_END),
        "pad_token_id": end,
        "dtype": recipe.dtype,
    }


def _llama_like(recipe: Recipe) -> dict[str, Any]:
    return {
        **_shared(recipe),
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": recipe.max_positions,
    }


def _mistral(recipe: Recipe) -> PretrainedConfig:
    return MistralConfig(**_llama_like(recipe), sliding_window=recipe.sliding_window or None)


def _gemma3(recipe: Recipe) -> PretrainedConfig:
    # Gemma 3 has five windowed layers for each full one. Small models alternate, so that both kinds are always present.
    layer_types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(recipe.layers)]
    return Gemma3TextConfig(
        **_llama_like(recipe), sliding_window=recipe.sliding_window, layer_types=layer_types, query_pre_attn_scalar=recipe.head_dim
    )


def _gpt2(recipe: Recipe) -> PretrainedConfig:
    return GPT2Config(
        **_shared(recipe),
        n_embd=recipe.hidden,
        n_inner=recipe.intermediate,
        n_layer=recipe.layers,
        n_head=recipe.heads,
        n_positions=recipe.max_positions,
    )


_PLAIN: dict[str, type[PretrainedConfig]] = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}
_OTHER = {"mistral": _mistral, "gemma3": _gemma3, "gpt2": _gpt2}

"""Tiny random models of every family that the tests cover.

Untied embeddings and initializer_range=0.2: with tied ones or the usual 0.02 a random model greedily repeats its last token, and an
engine that attends to the wrong keys would go unnoticed.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 512
LENGTH = 4096
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 48, "num_hidden_layers": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _COMMON),
    "qwen2": ("qwen2", _COMMON),
    "qwen3": ("qwen3", _COMMON | {"head_dim": 32}),
    "mistral": ("mistral", _COMMON | {"sliding_window": 100}),
    "gemma2": ("gemma2", _COMMON | _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 20.0}),
    "gemma3": ("gemma3_text", _COMMON | _GEMMA | {"sliding_window_pattern": 3}),
    "gpt2": (
        "gpt2",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": LENGTH,
            "initializer_range": 0.2,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
}


def build_model(family: str, **overrides: Any) -> PreTrainedModel:
    """Return a float32 model of `family` with fixed random weights, in evaluation mode with transformers' own attention."""
    kind, settings = FAMILIES[family]
    config = AutoConfig.for_model(kind, **(settings | overrides))
    torch.manual_seed(7)
    # Gemma 2 soft-caps its scores and gpt-oss has sinks, which transformers does in its eager attention only.
    attention = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


def save_model(family: str, folder: Path, **overrides: Any) -> PreTrainedModel:
    """Build the model and write config.json, generation_config.json and model.safetensors to `folder`. Return the model."""
    model = build_model(family, **overrides)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, for a conftest.py: matrices this small are slower on two threads, six times on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """Leave the objects of the whole test run out of full collections, each of which would take a second."""
    gc.freeze()
    yield
    gc.unfreeze()

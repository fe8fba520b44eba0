"""Tiny random models of every family that the tests cover, from the product's list of families."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from fairlead_worker.model.catalog import COMMON, LENGTH, REFUSED, SERVED, VOCABULARY

__all__ = [
    "ALL",
    "COMMON",
    "FAMILIES",
    "LENGTH",
    "VOCABULARY",
    "build_model",
    "one_thread",
    "quick_collections",
    "save_model",
    "save_refused",
]
EAGER = ("soft-capped scores", "attention sinks")
"""Mechanisms that only transformers' eager attention has."""

ALL: dict[str, tuple[str, dict[str, Any]]] = {name: (family.model_type, family.config) for name, family in SERVED.items()}
"""Name of each family that is served -> its model type and the settings of its small config."""
FAMILIES = {name: ALL[name] for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2")}
"""Those that are tested with more: long prompts, page sizes, attention backends, speculative decoding."""


def build_model(family: str, **overrides: Any) -> PreTrainedModel:
    """Return a float32 model of `family` with fixed random weights, in evaluation mode with transformers' own attention."""
    kind, settings = FAMILIES.get(family) or ALL[family]
    config = AutoConfig.for_model(kind, **(settings | overrides))
    torch.manual_seed(7)
    needs_eager = family in SERVED and any(name in SERVED[family].mechanisms for name in EAGER)
    has_sdpa = AutoModelForCausalLM._model_mapping[type(config)]._supports_sdpa
    attention = "eager" if needs_eager or not has_sdpa else "sdpa"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


def save_model(family: str, folder: Path, **overrides: Any) -> PreTrainedModel:
    """Build the model and write config.json, generation_config.json and model.safetensors to `folder`. Return the model."""
    model = build_model(family, **overrides)
    model.save_pretrained(folder)
    return model


def save_refused(family: str, folder: Path) -> None:
    """Write a small model of a `family` that is refused to `folder`."""
    refused = REFUSED[family]
    made = AutoModelForSequenceClassification if "num_labels" in refused.settings else AutoModelForCausalLM
    made.from_config(AutoConfig.for_model(refused.model_type, **refused.config)).save_pretrained(folder)


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

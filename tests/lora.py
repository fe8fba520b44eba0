"""Random LoRA adapters for tests, made and merged by peft itself."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tests.models import build_model
from transformers import PreTrainedModel

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(
    base: PreTrainedModel, folder: Path, seed: int, *, targets: "list[str] | str" = TARGETS, **settings: Any
) -> PreTrainedModel:
    """Write an adapter for `base` (which it changes) to `folder`. Return `base` with the adapter merged into its weights."""
    config = LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **({"r": 8, "lora_alpha": 16} | settings))
    tuned = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "lora_" in name:  # B is initialised with zeros, so an adapter would have no effect
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15)
    tuned.save_pretrained(folder)
    merged: PreTrainedModel = tuned.merge_and_unload()
    return merged


def adapter_of(family: str, folder: Path, seed: int, **settings: Any) -> PreTrainedModel:
    """Do the same as `save_adapter` for the test model of `family`."""
    return save_adapter(build_model(family), folder, seed, **settings)

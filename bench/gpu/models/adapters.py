"""Random LoRA adapters, written as PEFT writes them."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from fairlead_worker.lora.layers import adaptable_layers
from fairlead_worker.model.loader import LoadedModel

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(loaded: LoadedModel, folder: Path, seed: int, rank: int, targets: Sequence[str] = TARGETS, scale: float = 0.02) -> Path:
    """An adapter of `rank` on the layers called `targets`, in `folder`."""
    drawn = torch.Generator(loaded.device).manual_seed(seed)
    weights = {}
    for path, (inputs, outputs) in adaptable_layers(loaded.model).items():
        if path.rpartition(".")[2] in targets:
            for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                weight = torch.randn(shape, generator=drawn, device=loaded.device) * scale
                weights[f"base_model.model.{path}.lora_{half}.weight"] = weight.to(loaded.dtype)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder

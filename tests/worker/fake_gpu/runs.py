"""Models and steps on a fake GPU."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.models import ALL as SERVED
from tests.models import FAMILIES
from tests.worker.execution.planner import Planner, make_request
from tests.worker.fake_gpu.device.worker import FakeGroup, make_model
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.ipc.messages import Sampling, ThinkingBudget
from fairlead_worker.lora.layers import adaptable_layers
from fairlead_worker.model.loader import LoadedModel

ALL = FAMILIES | {
    name: SERVED[name]
    for name in (
        "phi3", "gpt_neox", "olmo2", "olmo3", "granite", "starcoder2", "opt", "cohere2", "glm4", "smollm3", "tied qwen2", "mixtral",
        "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe", "deepseek_v3", "gpt_oss", "linear rope", "yarn rope", "llama3 rope",
        "dynamic rope", "longrope",
    )
}  # fmt: skip
PAGES, PAGE = 64, 16
LONG = {"short_factor": [1 + place / 10 for place in range(32)], "long_factor": [2 + place / 2 for place in range(32)]}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 256, "hidden_size": 256},
    "opt": {"hidden_size": 256, "word_embed_proj_dim": 256},
    "longrope": {"hidden_size": 256, "rope_parameters": ALL["longrope"][1]["rope_parameters"] | LONG},
    "deepseek_v3": {},
}
"""Settings for heads of 64, of families that name them in their own way."""
GREEDY = Sampling(max_tokens=4, temperature=0, ignore_eos=True)
DRAWN = Sampling(max_tokens=4, temperature=0.8, top_k=20, ignore_eos=True)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top_k": {"top_k": 20},
    "large top_k": {"top_k": 400},
    "top_p": {"top_p": 0.9},
    "top_k and top_p": {"top_k": 20, "top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": ((5, 2.0),)},
    "allowed tokens": {"allowed_token_ids": (0, 1, 2)},
    "bad_words": {"bad_words": ((7,),)},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (3,)},
    "logprobs": {"logprobs": 3},
    "thinking": {"thinking": ThinkingBudget(1, (8,), (9,), (10,))},
}


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    """Return the config of `family` with heads of 64, which FlashInfer supports."""
    kind, settings = ALL[family]
    return AutoConfig.for_model(kind, **(settings | SIZES.get(family, {"hidden_size": 256, "head_dim": 64}) | changes))


def load(
    family: str, group: FakeGroup | None = None, quantization: str = "none", kv_scale: float | None = None, **changes: Any
) -> LoadedModel:
    return make_model(config_of(family, **changes), group, quantization=quantization, kv_scale=kv_scale)


def planner_of(*samplings: Sampling) -> Planner:
    """Return requests of 20, 33, 46, … prompt tokens, computed in chunks of 24: the second step mixes chunks and decodes."""
    requests = [make_request(str(number), range(2, 22 + 13 * number), sampling, number) for number, sampling in enumerate(samplings)]
    return Planner(requests, PAGES, PAGE, 24)


def serve(runner: ModelRunner, *samplings: Sampling) -> None:
    """Run a request of each sampling to its end."""
    planner = planner_of(*samplings)
    planner.run(runner)
    assert all(request.output_length == request.sampling.max_tokens for request in planner.requests)


def write_adapter(model: PreTrainedModel, folder: Path, rank: int) -> None:
    """Write an adapter of every layer, from the host's memory."""
    weights = {}
    for path, (inputs, outputs) in adaptable_layers(model).items():
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            weights[f"base_model.model.{path}.lora_{half}.weight"] = torch.ones(shape, dtype=torch.bfloat16)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))

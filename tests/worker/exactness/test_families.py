"""Greedy output equals transformers' `generate` for many families: chunked, batched, cold and cached, across windows and pages."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import models
from tests.lora import save_adapter
from tests.models import build_model, save_model
from tests.worker.exactness.families import MORE, ORIGINAL
from tests.worker.exactness.harness import Engine, generate, make_prompts
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

from fairlead_worker.errors import AdapterError, ModelLoadError
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import load_model

PROMPTS = [prompt for prompt in make_prompts() if len(prompt) in (2, 17, 33, 64, 129, 200, 333)]
LONG = [prompt for prompt in PROMPTS if len(prompt) > ORIGINAL]


@pytest.fixture(autouse=True)
def more_families(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, made in MORE.items():
        monkeypatch.setitem(models.FAMILIES, name, made)


@pytest.mark.parametrize("family", [name for name in MORE if name != "longrope"])
def test_it_says_what_generate_says(family: str, tmp_path: Path) -> None:
    expected = generate(save_model(family, tmp_path), PROMPTS)
    assert len({token for tokens in expected for token in tokens}) > 25, "a model that repeats itself would agree with anything"
    engine = Engine(load_model(str(tmp_path)), chunk=48, pages=200)
    assert engine.serve(PROMPTS) == expected
    warm = engine.serve_counted(PROMPTS)
    assert [tokens for tokens, _ in warm] == expected
    assert [cached for _, cached in warm] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert engine.mixed_steps > 5


def test_gpt_oss_as_it_is_published_with_experts_in_mxfp4(tmp_path: Path) -> None:
    model = save_model("gpt_oss", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(121, 125, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    asked = {"quantization_config": Mxfp4Config(dequantize=True), "attn_implementation": "eager", "dtype": torch.float32}
    expected = generate(type(model).from_pretrained(tmp_path, **asked).eval(), PROMPTS)
    assert len({token for tokens in expected for token in tokens}) > 25
    assert Engine(load_model(str(tmp_path), dtype="float32"), chunk=48).serve(PROMPTS) == expected


def test_longrope_within_and_beyond_its_original_length(tmp_path: Path) -> None:
    """Which frequencies it serves with, the longest text decides, once for all: cached KV is shared by texts of any length."""
    model = save_model("longrope", tmp_path)
    short = [prompt for prompt in PROMPTS if len(prompt) + 20 <= ORIGINAL]
    within = load_model(str(tmp_path))
    assert within.max_model_len == ORIGINAL
    assert Engine(within, chunk=48).serve(short) == generate(model, short)
    beyond = load_model(str(tmp_path), max_model_len=models.LENGTH)
    for native in (True, False):
        engine = Engine(beyond, chunk=48, native_decoder=native)
        engine.serve(short)
        for _ in range(2):
            assert engine.serve(LONG) == generate(model, LONG)


def test_a_rope_that_is_another_for_each_length_is_refused_beyond_the_first(tmp_path: Path) -> None:
    rope = MORE["dynamic rope"][1]["rope_parameters"]
    save_model("dynamic rope", tmp_path, rope_parameters=rope | {"original_max_position_embeddings": 64})
    assert load_model(str(tmp_path)).max_model_len == 64
    with pytest.raises(ModelLoadError, match="beyond 64 tokens its rope"):
        load_model(str(tmp_path), max_model_len=65)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("gptj", {"n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8}, "does not use transformers' attention interface"),
        (
            "llama4_text",
            {"num_local_experts": 2, "intermediate_size_mlp": 32, "head_dim": 16, "attention_chunk_size": 64},
            "chunked_attention",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(kind: str, settings: dict, says: str, tmp_path: Path) -> None:
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(small | settings))).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=says):
        load_model(str(tmp_path), max_model_len=16)


def test_adapters_of_a_model_with_experts(tmp_path: Path) -> None:
    """Attention is adapted as anywhere; experts are not, and that is said."""
    save_model("qwen3_moe", tmp_path / "base")
    merged = save_adapter(build_model("qwen3_moe"), tmp_path / "a", 0, targets=["q_proj", "o_proj"])
    loaded = load_model(str(tmp_path / "base"))
    adapters = AdapterSet(loaded, 2, 64)
    adapters.load(1, "a", "file:///a", tmp_path / "a")
    expected = generate(merged, PROMPTS)
    assert Engine(loaded, chunk=48, adapters=adapters).serve(PROMPTS, adapters=[1] * len(PROMPTS)) == expected
    save_adapter(build_model("qwen3_moe"), tmp_path / "b", 1, targets=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.raises(AdapterError, match="experts"):
        adapters.load(2, "b", "file:///b", tmp_path / "b")

"""The text part of models that also read images or sound says what the whole model's `generate` says to a text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import COMMON, save_model
from tests.worker.exactness.harness import Engine, generate, make_prompts
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedModel

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.catalog import SERVED
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.wrappers import WRAPPERS, plain_config, text_names

PROMPTS = [prompt for prompt in make_prompts() if len(prompt) in (2, 33, 129)]


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default", "mrope_section": list(sections)}}


_OF_TEXT = {
    "aya_vision": {"sliding_window": 48},
    "cohere2_vision": {"sliding_window": 48},
    "gemma3": SERVED["gemma3"].settings,
    "gemma4": SERVED["gemma4 (text)"].settings | {"pad_token_id": 0},
    "gemma4_unified": SERVED["gemma4_unified (text)"].settings | {"pad_token_id": 0},
    "llama4": SERVED["llama4 (text)"].settings,
    "qwen2_vl": _rope(2, 3, 3),
    "qwen2_5_vl": _rope(2, 3, 3),
    "qwen3_5": SERVED["qwen3_5 (text)"].settings | _rope(2, 1, 1),
    "qwen3_5_moe": SERVED["qwen3_5_moe (text)"].settings | _rope(2, 1, 1),
    "qwen3_vl": {"head_dim": 32, **_rope(6, 5, 5)},
    "qwen3_vl_moe": {"head_dim": 32, **_rope(6, 5, 5), "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
_OF_ENCODER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1, "embed_dim": 32,
    "num_heads": 2, "out_hidden_size": 64, "encoder_layers": 1, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
}  # fmt: skip


def save_wrapper(kind: str, folder: Path, tied: bool = False) -> PreTrainedModel:
    """Save a small random model of a kind that reads more than text, and return it."""
    default = CONFIG_MAPPING[kind]()
    settings: dict[str, Any] = {"tie_word_embeddings": tied}
    text = COMMON | _OF_TEXT.get(kind, {}) | {"tie_word_embeddings": tied}
    settings["text_config"] = type(default.get_text_config(decoder=True))(**text).to_dict()
    for name in ("vision_config", "audio_config"):
        if getattr(default, name, None) is not None:
            encoder = getattr(default, name).to_dict()
            settings[name] = encoder | {key: value for key, value in _OF_ENCODER.items() if key in encoder}
    if "vision_feature_layer" in default.to_dict():
        settings["vision_feature_layer"] = -1
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(CONFIG_MAPPING[kind](**settings)).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", [kind for kind in WRAPPERS if kind != "gemma3n"])
def test_the_text_part_says_what_the_whole_says(kind: str, tmp_path: Path) -> None:
    for tied in (False, True):
        folder = tmp_path / str(tied)
        expected = generate(save_wrapper(kind, folder, tied), PROMPTS)
        assert tied or len({token for tokens in expected for token in tokens}) > 10, "a tied Gemma repeats its last token"
        assert Engine(load_model(str(folder)), chunk=48).serve(PROMPTS) == expected, tied


def test_the_text_part_of_gemma_3n(tmp_path: Path) -> None:
    """Its encoders need packages that the tests lack: the whole checkpoint is the text part's under longer names."""
    expected = generate(save_model("gemma3n (text)", tmp_path), PROMPTS)
    config, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": config}))
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(file).items()}
    tensors |= {"model.vision_tower.weight": torch.zeros(1), "model.embed_audio.weight": torch.zeros(1)}
    save_file(tensors, file, {"format": "pt"})
    engine = Engine(load_model(str(tmp_path)), chunk=48)
    assert engine.runner.path == "layers" and engine.serve(PROMPTS) == expected


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    expected = generate(save_model("deepseek_v3", tmp_path), PROMPTS)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "x.Kimi"}}))
    assert Engine(load_model(str(tmp_path)), chunk=48).serve(PROMPTS) == expected


def test_a_config_without_a_text_part_of_its_own_is_read_flat() -> None:
    """As the first Qwen2-VL checkpoints have it."""
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    raw = {"model_type": "qwen2_vl", "hidden_size": 64, "rope_scaling": rope, "vision_config": {"depth": 1}, "eos_token_id": 7}
    assert plain_config(raw) == ({"model_type": "qwen2", "hidden_size": 64, "rope_scaling": None, "eos_token_id": 7}, True)
    for other in ("llama", [], None):
        assert plain_config({"model_type": other}) is None


def test_a_checkpoint_without_its_head_is_refused_unless_it_is_tied(tmp_path: Path) -> None:
    save_wrapper("mistral3", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "lm_head" not in name}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"missing weights: 1 tensors, first lm_head\.weight"):
        load_model(str(tmp_path))


def test_names_of_all_forms_of_a_checkpoint() -> None:
    for prefix in ("language_model.model.", "model.language_model.", "model.text_model.", "model."):
        name = f"{prefix}norm.weight"
        others = ["visual.norm.weight", "vision_tower.norm.weight", "model.vision_embedder.pos_norm.weight"]
        assert text_names([name, *others]) == {name: "model.norm.weight"}
    assert text_names(["language_model.lm_head.weight"]) == {"language_model.lm_head.weight": "lm_head.weight"}


def test_modules_that_are_not_quantized_have_the_plain_models_names() -> None:
    def read(*ignored: str) -> list[str]:
        quantization = {"quant_method": "compressed-tensors", "ignore": list(ignored)}
        made = plain_config({"model_type": "mistral3", "text_config": {"quantization_config": None}, "quantization_config": quantization})
        assert made is not None
        ignore: list[str] = made[0]["quantization_config"]["ignore"]
        return ignore

    assert read("language_model.lm_head", "re:.*vision_tower.*") == ["lm_head", "re:.*vision_tower.*"]
    assert read("model.language_model.layers.0.mlp", "lm_head") == ["model.layers.0.mlp", "lm_head"]
    with pytest.raises(ValueError, match=r"pattern 're:.*language_model"):
        read("re:.*language_model.*o_proj")

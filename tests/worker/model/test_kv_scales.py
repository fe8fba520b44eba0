"""Scales of float8 KV: read under the names that checkpoints give them, and refused where they cannot be meant."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import save_model
from tests.worker.model.checkpoints import FORMS, save_quantized

from fairlead_worker.check.gpus import GPUS
from fairlead_worker.check.report import check_model
from fairlead_worker.config import WorkerConfig
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.trial_text import TrialText, run_whole

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def add_scales(folder: Path, scales: dict[str, Any]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: torch.tensor(value) for name, value in scales.items()}, path, metadata={"format": "pt"})


def set_quantization(folder: Path, given: dict[str, Any]) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": given}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.kv_scale", "self_attn.kv_scale"),
    ],
)
def test_the_larger_scale_of_a_layer_is_taken(key: str, value: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    add_scales(tmp_path, {f"model.layers.0.{key}": [0.25], f"model.layers.0.{value}": 0.5, f"model.layers.1.{key}": 2.0})
    assert load_model(str(tmp_path), kv_cache_dtype="fp8").kv_scales == (0.5, 2.0)
    assert load_model(str(tmp_path)).kv_scales is None


def test_layers_without_a_scale_have_one_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model("llama", tmp_path)
    with caplog.at_level(logging.INFO):
        assert load_model(str(tmp_path), kv_cache_dtype="fp8").kv_scales == (1.0, 1.0)
        assert "no scales of the KV cache" in caplog.text
        add_scales(tmp_path, {"model.layers.1.self_attn.k_scale": 0.5})
        assert load_model(str(tmp_path), kv_cache_dtype="fp8").kv_scales == (1.0, 0.5)
    assert "1 of 2 layers have no scale" in caplog.text


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), [1.0, 2.0]])
def test_a_scale_that_cannot_be_meant_is_refused_by_name(scale: Any, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    add_scales(tmp_path, {"model.layers.1.self_attn.v_scale": scale})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.self_attn\.v_scale.*take --kv-cache-dtype auto"):
        load_model(str(tmp_path), kv_cache_dtype="fp8")
    load_model(str(tmp_path))


def test_blocks_of_another_dtype_have_other_hashes(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    assert load_model(str(tmp_path)).digest != load_model(str(tmp_path), kv_cache_dtype="fp8").digest


@pytest.mark.parametrize("weights", [True, False], ids=["with weights in float8", "alone"])
def test_a_scheme_of_the_kv_cache_changes_nothing_inside_the_model(weights: bool, tmp_path: Path) -> None:
    """compressed-tensors would round keys and values of every forward pass by the scheme's scales."""
    form = FORMS["float8, a scale for each output"]
    model = save_quantized(form, tmp_path) if weights else save_model("llama", tmp_path)
    add_scales(tmp_path, {f"model.layers.{layer}.self_attn.{part}_scale": [2.0] for layer in (0, 1) for part in "kv"})
    about = form.about | {"kv_cache_scheme": SCHEME}
    set_quantization(tmp_path, about if weights else about | {"config_groups": {}, "format": "dense"})
    loaded = load_model(str(tmp_path), dtype="float32", kv_cache_dtype="fp8")
    assert loaded.kv_scales == (2.0, 2.0)
    assert not any(hasattr(module, "k_scale") for module in loaded.model.modules())
    text = TrialText.random(loaded.vocabulary_size)
    got = run_whole(loaded.model, loaded.layers, text, torch.float32)[: len(text.tokens[0])]
    torch.testing.assert_close(got, model(text.tokens[0][None]).logits[0], atol=2e-3, rtol=2e-3)


def test_only_layers_with_attention_need_a_scale(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other layers of LFM2 are convolutions. A check reads the same scales as a load."""
    save_model("lfm2", tmp_path)
    add_scales(tmp_path, {"model.layers.2.self_attn.k_scale": 0.5})
    with caplog.at_level(logging.INFO, "fairlead_worker.model.kv_scales"):
        assert load_model(str(tmp_path), kv_cache_dtype="fp8").kv_scales == (0.5,)
        assert check_model(WorkerConfig(model=f"file://{tmp_path}", kv_cache_dtype="fp8"), tmp_path, GPUS["H100"]).served
    assert not [each for each in caplog.records if each.name == "fairlead_worker.model.kv_scales"]

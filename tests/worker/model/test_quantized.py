"""Weights of fewer bits: what is loaded computes what its numbers say, and what cannot be had is refused by name."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import save_model
from tests.worker.exactness.harness import Engine, generate, make_prompts

from fairlead_worker.model import quantized
from fairlead_worker.model.errors import ModelLoadError
from fairlead_worker.model.loader import load_model

PROMPTS = make_prompts()[:9]
GROUP = 32


def fp8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    small = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale": scale}, small.float() * scale


def int4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    groups = weight.view(weight.shape[0], -1, GROUP)
    scale = groups.abs().amax(2) / 7
    small = (groups / scale[:, :, None]).round().clamp(-8, 7)
    nibbles = (small.view(weight.shape[0], -1, 8) + 8).to(torch.int64)
    packed = (nibbles << torch.arange(0, 32, 4)).sum(2)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    parts = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return parts, (small * scale[:, :, None]).view_as(weight)


WEIGHTS: dict[str, Any] = {
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True, "dynamic": False},
}


@pytest.mark.parametrize(("form", "made"), [("float-quantized", fp8), ("pack-quantized", int4)])
def test_a_checkpoint_of_compressed_tensors_says_what_its_numbers_say(form: str, made: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="the extra gpu is not installed")
    model = save_model("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, plain = made(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in parts.items()}
        model.get_parameter(name).data.copy_(plain)
    save_file(tensors, path, metadata={"format": "pt"})
    about = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS[form]}},
    }
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": about}))
    loaded = load_model(str(tmp_path))
    assert loaded.dtype == torch.float32
    assert Engine(loaded, chunk=64).serve(PROMPTS) == generate(model, PROMPTS)


def test_fp8_is_made_at_load(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="the extra gpu is not installed")
    model = save_model("llama", tmp_path)
    loaded = load_model(str(tmp_path), quantization="fp8")
    for name, module in loaded.model.named_modules():
        if name.endswith("_proj"):
            assert not quantized.plain(module)
            model.get_parameter(f"{name}.weight").data.copy_(module.weight.dequantize())
    assert Engine(loaded, chunk=64).serve(PROMPTS) == generate(model, PROMPTS)


LEAN = """
import sys
from fairlead_worker.model.lean import import_transformers
import_transformers()
from fairlead_worker.model.loader import load_model
load_model(sys.argv[1])
assert not [name for name in sys.modules if name.startswith("torchao")]
loaded = load_model(sys.argv[1], quantization="fp8")
print(type(loaded.model.get_submodule("model.layers.0.mlp.down_proj").weight).__module__)
"""


def test_torchao_is_imported_only_for_who_wants_it(tmp_path: Path) -> None:
    """As an engine does it, in a process of its own; --quantization finds it all the same."""
    pytest.importorskip("torchao", reason="the extra gpu is not installed")
    save_model("llama", tmp_path)
    done = subprocess.run([sys.executable, "-c", LEAN, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.strip().startswith("torchao."), done.stderr


@pytest.mark.parametrize(
    ("quantization", "method", "cause"),
    [
        ("fp8", "", "--quantization fp8, which takes the package torchao, and that is not installed"),
        ("int4", "", "--quantization int4 is for GPUs, and this is a CPU"),
        ("none", "awq", r"quantized \(awq\), which takes the package gptqmodel, and that is not installed"),
        ("none", "eetq", r"quantized \(eetq\), which is not supported; use one of awq, compressed-tensors"),
        ("fp8", "fp8", "quantized already: leave out --quantization fp8"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    quantization: str, method: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama", tmp_path)
    config = tmp_path / "config.json"
    if method:
        about = {"quantization_config": {"quant_method": method, "bits": 4, "weight_block_size": [128, 128]}}
        config.write_text(json.dumps(json.loads(config.read_text()) | about))
    missing = {"torchao", "gptqmodel"}
    monkeypatch.setattr(quantized, "find_spec", lambda name: None if name in missing else name)
    with pytest.raises(ModelLoadError, match=cause):
        load_model(str(tmp_path), quantization=quantization)


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
def test_a_divided_model_is_not_quantized(quantization: str) -> None:
    with pytest.raises(ModelLoadError, match=f"--quantization {quantization} goes with one device: leave out --tensor-parallel 2"):
        quantized.made_at_load("file:///m", quantization, torch.device("cpu"), ranks=2)
    with pytest.raises(ModelLoadError, match=r"quantized \(torchao\), and those are not divided"):
        quantized.check_checkpoint("file:///m", "torchao", ranks=2)

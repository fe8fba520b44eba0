"""Checkpoints whose experts stay in 8 bits: their numbers, ranks' parts, and why others are widened."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.gpu.models.low_bit_weights import narrow_experts
from safetensors.torch import load_file, save_file
from tests.worker.model.checkpoints import (
    EIGHT,
    FORMS,
    TOKEN,
    TOKEN_FP8,
    Form,
    Made,
    blocks,
    compressed,
    fp8,
    fp8_of_tensors,
    fp8_with_one_scale,
    save_quantized,
)
from tests.worker.model.formats.alone import Alone, pretend_gpu
from tests.worker.model.formats.test_float8 import AUTO_FP8, BLOCKS, add_predictor, fp8_of_scalars, ragged, save
from transformers import AutoConfig, PreTrainedModel

from fairlead_worker.check.gpus import GPUS
from fairlead_worker.check.report import check_model
from fairlead_worker.config import WorkerConfig
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model import loader
from fairlead_worker.model.formats import experts
from fairlead_worker.model.formats.base import Target
from fairlead_worker.model.formats.experts import KeptExperts, find_experts, find_kept_experts
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.lowbit import choose
from fairlead_worker.model.lowbit.choose import choose_trial_sizes, find_problem
from fairlead_worker.model.lowbit.experts import ExpertWeights, LowBitExperts, PlainProduct, Scales
from fairlead_worker.model.lowbit.linear import Fp8BlockLinear
from fairlead_worker.model.lowbit.rows import TorchRounder
from fairlead_worker.model.trial import trial_logits
from fairlead_worker.sharding.weights import open_tensors


def four_bits(weight: torch.Tensor) -> Made:
    narrow = narrow_experts(weight[None], Scales.GROUPS)
    return {"weight_packed": narrow.values[0], "weight_scale": narrow.scale[0]}, narrow.numbers()[0]


FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "num_experts": 3}
TENSOR = EIGHT | {"strategy": "tensor"}
KEPT = {
    "blocks": Form(blocks(128, 128, "weight_scale_inv"), BLOCKS, SIZES, "qwen3_moe"),
    "blocks beside shared experts": Form(
        blocks(128, 128, "weight_scale_inv"),
        BLOCKS | {"modules_to_not_convert": ["lm_head", "shared_expert_gate"]},
        SIZES | {"shared_expert_intermediate_size": 256},
        "qwen2_moe",
    ),
    "a scale for each output": Form(fp8, TOKEN_FP8, SIZES, "qwen3_moe"),
    "a scale for each tensor": Form(
        fp8_with_one_scale, compressed("float-quantized", TENSOR, TOKEN | {"type": "float"}), SIZES, "qwen3_moe"
    ),
    "fixed scales of inputs": Form(fp8_of_tensors, compressed("float-quantized", TENSOR, TENSOR | {"dynamic": False}), SIZES, "qwen3_moe"),
    "MXFP4": Form(four_bits, compressed("mxfp4-pack-quantized", FLOAT4), SIZES, "qwen3_moe"),
    "AutoFP8": Form(fp8_of_tensors, AUTO_FP8, SIZES, "qwen3_moe"),
    "AutoFP8, scalars": Form(fp8_of_scalars, AUTO_FP8, SIZES, "qwen3_moe"),
    "inputs as they are": Form(fp8, FORMS["float8, a scale for each output"].about, SIZES, "qwen3_moe"),
}

DEEPSEEK = Form(
    ragged, BLOCKS, {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256, "n_routed_experts": 4}, "deepseek_v3"
)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this device is a GPU that multiplies float8, in blocks too."""
    pytest.importorskip("compressed_tensors", reason="the extra gpu is not installed")
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(experts, "load_triton_product", PlainProduct)


def kept(model: PreTrainedModel) -> list[LowBitExperts]:
    return [module for module in model.modules() if isinstance(module, LowBitExperts)]


@pytest.mark.parametrize("form", KEPT.values(), ids=KEPT)
def test_experts_have_the_files_numbers(form: Form, tmp_path: Path) -> None:
    plain = save(form, tmp_path)
    layers = kept(load_model(str(tmp_path), dtype="bfloat16").model)
    wide: list[Any] = [module for _, module in find_experts(plain)]
    assert len(layers) == len(wide) > 0
    for layer, module in zip(layers, wide, strict=True):
        assert (layer.rounder is not None) == (form not in (KEPT["inputs as they are"], KEPT["MXFP4"]))
        bits = 4 if form is KEPT["MXFP4"] else 8
        for part, name in ((layer.gate_up, "gate_up_proj"), (layer.down, "down_proj")):
            assert 8 * part.values.nbytes == bits * part.numbers().numel()
            assert torch.equal(part.numbers(), getattr(module, name))


@pytest.mark.parametrize("form", KEPT.values(), ids=KEPT)
def test_a_model_is_near_its_widened_numbers(form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(form, tmp_path)
    narrow = trial_logits(load_model(str(tmp_path), dtype="bfloat16").model).float()
    monkeypatch.setattr(loader, "capability_of", lambda device: None)
    wide = load_model(str(tmp_path), dtype="bfloat16").model
    assert not kept(wide)
    assert (narrow - (want := trial_logits(wide).float())).norm() <= 0.15 * want.norm()


@pytest.mark.parametrize(
    ("form", "name", "quantized"),
    [
        (KEPT["blocks"], "mtp.layers.0.", True),
        (DEEPSEEK, "model.layers.2.", True),
        (DEEPSEEK, "model.layers.2.", False),
    ],
    ids=["Qwen3-Next", "DeepSeek V3", "DeepSeek V3, in 16 bits"],
)
def test_experts_that_predict_further_tokens_are_not_the_decoders(form: Form, name: str, quantized: bool, tmp_path: Path) -> None:
    plain = save(form, tmp_path)
    add_predictor(tmp_path, "model.layers.1.", name, quantized)
    wide: list[Any] = [module for _, module in find_experts(plain)]
    layers = kept(load_model(str(tmp_path), dtype="bfloat16").model)
    assert len(layers) == len(wide)
    assert all(torch.equal(layer.down.numbers(), module.down_proj) for layer, module in zip(layers, wide, strict=True))


def test_a_config_without_sizes_of_plain_layers_is_read(tmp_path: Path) -> None:
    """That of Qwen3.5 with experts has no `intermediate_size`."""
    plain = save(Form(ragged, BLOCKS, SIZES | {"shared_expert_intermediate_size": 128}, "qwen3_5_moe (text)"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["intermediate_size"]
    path.write_text(json.dumps(config))
    assert len(kept(load_model(str(tmp_path), dtype="bfloat16").model)) == plain.config.num_hidden_layers
    report = check_model(WorkerConfig(model=f"file://{tmp_path}", dtype="bfloat16"), tmp_path, GPUS["H100"])
    assert report.served and report.quantization == "fp8, kept"


def test_a_missing_expert_is_said(tmp_path: Path) -> None:
    save(KEPT["blocks"], tmp_path)
    path = tmp_path / "model.safetensors"
    left = {name: tensor for name, tensor in load_file(path).items() if ".layers.1.mlp.experts.2." not in name}
    save_file(left, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.experts: the files have no gate_proj of expert 2"):
        load_model(str(tmp_path), dtype="bfloat16")


def test_a_gpu_without_float8_keeps_experts_and_widens_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "capability_of", lambda device: (8, 6))
    plain = save(KEPT["blocks"], tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16").model
    assert not any(isinstance(module, Fp8BlockLinear) for module in model.modules())
    wide: list[Any] = [module for _, module in find_experts(plain)]
    assert [layer.rounder for layer in kept(model)] == [None] * len(wide)
    assert torch.equal(kept(model)[0].down.numbers(), wide[0].down_proj)


@pytest.mark.parametrize("name", ["blocks", "a scale for each output", "a scale for each tensor", "AutoFP8, scalars", "MXFP4"])
def test_the_parts_of_ranks_are_the_whole(name: str, tmp_path: Path) -> None:
    form = KEPT[name]
    changes = SIZES | {"hidden_size": 256, "num_key_value_heads": 4, "num_attention_heads": 4}
    plain = save(Form(form.make, form.about, changes, form.family), tmp_path)
    wide: Any = [*find_experts(plain)][-1][1]
    for rank in (0, 1):
        layer = kept(load_model(str(tmp_path), dtype="bfloat16", group=Alone(rank)).model)[-1]
        rows = torch.cat([torch.arange(128) + 128 * place for place in (rank, 2 + rank)])
        assert torch.equal(layer.gate_up.numbers(), wide.gate_up_proj[:, rows])
        assert torch.equal(layer.down.numbers(), wide.down_proj[:, :, rank * 128 : rank * 128 + 128])


def test_no_rank_keeps_what_another_one_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    save(KEPT["blocks"], tmp_path)
    monkeypatch.setattr(Alone, "least", lambda self, number: 0)
    assert not kept(load_model(str(tmp_path), dtype="bfloat16", group=Alone(0)).model)
    assert "experts are widened to bfloat16: another rank's device does not multiply them right" in caplog.text


LAYERS = {"layers.0.mlp.experts": {}}


@pytest.mark.parametrize(
    ("changes", "scales", "dtype", "ranks", "reason"),
    [
        ({}, Scales.BLOCKS, torch.bfloat16, 2, ""),
        ({}, Scales.ROWS, torch.bfloat16, 4, ""),
        ({}, Scales.ROWS, torch.float16, 1, "products of experts in few bits are for --dtype bfloat16"),
        ({}, Scales.BLOCKS, torch.bfloat16, 4, "128 inputs, and 256 inner values on 4 ranks, are no multiples of 128"),
        ({"hidden_act": "relu"}, Scales.ROWS, torch.bfloat16, 1, "its activation is ReLU"),
        ({"num_hidden_layers": 2}, Scales.ROWS, torch.bfloat16, 1, "its layers have no experts of gate, up and down"),
    ],
)
def test_what_cannot_stay_says_why(changes: dict[str, Any], scales: Scales, dtype: torch.dtype, ranks: int, reason: str) -> None:
    usual = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1} | SIZES
    config = AutoConfig.for_model("qwen3_moe", **(usual | changes))
    config.quantization_config = dict(BLOCKS)
    found = experts.reason_against(config, scales, LAYERS, Target(dtype, (9, 0), ranks=ranks))
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_files_of_other_forms_say_so(tmp_path: Path) -> None:
    def found(folder: Path) -> KeptExperts | str:
        with open_tensors(folder, ["model.safetensors"]) as tensors:
            return find_kept_experts(AutoConfig.from_pretrained(folder), tensors, Target(torch.bfloat16, (9, 0)))

    save_quantized(Form(FORMS["int4 in groups"].make, FORMS["int4 in groups"].about, SIZES, "qwen3_moe"), tmp_path)
    assert found(tmp_path) == "their weights are I32, neither float8 (e4m3) nor MXFP4"
    save_quantized(Form(blocks(16, 32, "weight_scale_inv"), BLOCKS, SIZES, "qwen3_moe"), tmp_path / "small")
    reason = found(tmp_path / "small")
    assert isinstance(reason, str) and ("has scales of" in reason or "several forms" in reason)


def test_a_product_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that the trial covers each tile of the kernel."""

    class Swapped(PlainProduct):
        """Takes the scales of the next expert, for many rows alone."""

        def multiply(self, inputs: Any, weights: Any, route: Any, each: int) -> torch.Tensor:
            scale = weights.scale.roll(1, 0) if len(route.order) > 50 else weights.scale
            return super().multiply(inputs, ExpertWeights(weights.values, scale, weights.scales), route, each)

    cpu = torch.device("cpu")
    monkeypatch.setattr(choose, "choose_rounder", lambda device, blocks=False: TorchRounder(blocks))
    monkeypatch.setattr(choose, "load_triton_product", PlainProduct)
    for scales in Scales:
        assert find_problem(cpu, scales, False, 3) == "" and (scales is Scales.GROUPS or find_problem(cpu, scales, True, 3) == "")
    monkeypatch.setattr(choose, "load_triton_product", Swapped)
    assert "from float32" in find_problem(cpu, Scales.ROWS, True, 3)
    monkeypatch.setattr(choose, "load_triton_product", lambda: 1 / 0)
    assert find_problem(cpu, Scales.ROWS, True, 3).startswith("ZeroDivisionError")
    tiles = pytest.importorskip("fairlead_worker.model.lowbit.kernels.experts").TILES
    used = [next(tile for tile in tiles if 2 * tokens <= tile.most * 128) for tokens in choose_trial_sizes(128)]
    assert used == list(tiles)

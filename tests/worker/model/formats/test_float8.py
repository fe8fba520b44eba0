"""Float8 checkpoints of DeepSeek's kind that stay in 8 bits: their numbers, their layers, ranks' parts, and why others are widened."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.worker.model.checkpoints import FORMS, Form, Made, blocks, fp8_of_tensors, save_quantized
from tests.worker.model.formats.alone import Alone, explicit, pretend_gpu
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from fairlead_worker.model import loader
from fairlead_worker.model.formats import float8
from fairlead_worker.model.formats.base import Target
from fairlead_worker.model.formats.float8 import Float8, find_problem
from fairlead_worker.model.layers.stack import Stack
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.lowbit.linear import Fp8BlockLinear, Fp8Linear
from fairlead_worker.model.trial import trial_logits
from fairlead_worker.sharding.group import Gathered

SIZES = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 64}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
IN_BLOCKS = Form(blocks(128, 128, "weight_scale_inv"), BLOCKS, SIZES)


AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def fp8_of_scalars(weight: torch.Tensor) -> Made:
    """As AutoFP8 stores it: scales are scalars."""
    parts, plain = fp8_of_tensors(weight)
    return {name: part if name == "weight" else part.view(()) for name, part in parts.items()}, plain


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this device multiplies float8, in blocks too."""
    pretend_gpu(monkeypatch)


def ragged(weight: torch.Tensor) -> Made:
    """Blocks of 128 by 128 of which the last ones may be incomplete."""
    rows, columns = weight.shape
    parts, plain = blocks(128, 128, "weight_scale_inv")(torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128)))
    return parts | {"weight": parts["weight"][:rows, :columns]}, plain[:rows, :columns]


def save(form: Form, folder: Path) -> PreTrainedModel:
    """As `save_quantized`, with what is not quantized in bfloat16, as published checkpoints have it."""
    plain = save_quantized(form, folder)
    path = folder / "model.safetensors"
    tensors = {name: tensor if "_proj" in name else tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return plain


def linears(model: PreTrainedModel) -> dict[str, Fp8Linear]:
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, Fp8Linear)}


def test_layers_have_the_files_numbers_and_are_stacked(tmp_path: Path) -> None:
    plain = save(IN_BLOCKS, tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16").model
    layers = linears(model)
    assert len(layers) == 8 and {type(layer) for layer in layers.values()} == {Fp8BlockLinear}
    assert sum(isinstance(module, Stack) for module in model.modules()) == 4
    names = {"qkv_proj.linear": ("q_proj", "k_proj", "v_proj"), "gate_up_proj.linear": ("gate_proj", "up_proj")}
    for path, layer in layers.items():
        parent = path.removesuffix(".linear").rpartition(".")[0]
        parts = names.get(path.removeprefix(f"{parent}."), (path.rpartition(".")[2],))
        want = torch.cat([plain.get_parameter(f"{parent}.{part}.weight") for part in parts])
        assert layer.weight.dtype == torch.float8_e4m3fn and torch.equal(layer.numbers(), want), path


@pytest.mark.parametrize("make", [fp8_of_tensors, fp8_of_scalars])
@pytest.mark.parametrize("rank", [None, 1])
def test_layers_with_one_scale_have_the_files_numbers(make: Callable[[torch.Tensor], Made], rank: int | None, tmp_path: Path) -> None:
    """Fixed scales of inputs are not used. Ranks have a part of the weight, and its scale."""
    plain = save(Form(make, AUTO_FP8, SIZES), tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16", group=None if rank is None else Alone(rank)).model
    layers = linears(model)
    assert len(layers) == 8 and {type(layer) for layer in layers.values()} == {Fp8Linear}
    assert sum(isinstance(module, Stack) for module in model.modules()) == 4
    gate, up, down = (plain.get_parameter(f"model.layers.1.mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
    part = slice(0, 512) if rank is None else slice(256, 512)
    stacked = layers["model.layers.1.mlp.gate_up_proj.linear"]
    assert torch.equal(stacked.numbers(), torch.cat([gate[part], up[part]]))
    last = layers[f"model.layers.1.mlp.down_proj{'' if rank is None else '.layer'}"]
    assert last.weight.dtype == torch.float8_e4m3fn and torch.equal(last.numbers(), down[:, part])


@pytest.mark.parametrize("form", [Form(fp8_of_scalars, AUTO_FP8, SIZES), IN_BLOCKS], ids=["one scale", "blocks"])
def test_a_model_is_near_its_widened_numbers(form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(form, tmp_path)
    narrow = trial_logits(load_model(str(tmp_path), dtype="bfloat16").model).float()
    monkeypatch.setattr(loader, "capability_of", lambda device: None)
    wide = load_model(str(tmp_path), dtype="bfloat16").model
    assert not linears(wide)
    assert (narrow - (want := trial_logits(wide).float())).norm() <= 0.15 * want.norm()


def test_the_parts_of_ranks_are_the_whole(tmp_path: Path) -> None:
    plain = save(Form(IN_BLOCKS.make, BLOCKS, SIZES | {"hidden_size": 256, "num_key_value_heads": 4}), tmp_path)
    for rank in (0, 1):
        loaded = load_model(str(tmp_path), dtype="bfloat16", group=Alone(rank))
        layers = linears(loaded.model)
        for name, size, dim in (("gate_up_proj.linear", 256, 0), ("down_proj.layer", 256, 1)):
            layer = layers[f"model.layers.1.mlp.{name}"]
            sources = ("gate_proj", "up_proj") if dim == 0 else ("down_proj",)
            weights = [plain.get_parameter(f"model.layers.1.mlp.{source}.weight") for source in sources]
            assert torch.equal(layer.numbers(), torch.cat([weight.narrow(dim, rank * size, size) for weight in weights]))
        heads = plain.get_parameter("model.layers.0.self_attn.k_proj.weight").narrow(0, rank * 128, 128)
        stacked = layers["model.layers.0.self_attn.qkv_proj.linear"]
        assert torch.equal(stacked.part(128, 256).numbers(), heads)


def test_each_rank_has_its_part_of_a_head_in_float8(tmp_path: Path) -> None:
    save(Form(IN_BLOCKS.make, BLOCKS, SIZES | {"hidden_size": 256, "num_key_value_heads": 4}), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    parts, wide = IN_BLOCKS.make(tensors.pop("lm_head.weight").float())
    save_file(tensors | {f"lm_head.{name}": tensor for name, tensor in parts.items()}, path, metadata={"format": "pt"})
    for rank in (0, 1):
        head = load_model(str(tmp_path), dtype="bfloat16", group=Alone(rank)).model.get_submodule("lm_head")
        assert isinstance(head, Gathered) and isinstance(head.layer, Fp8BlockLinear)
        assert torch.equal(head.layer.numbers(), wide[rank * 256 : (rank + 1) * 256])


def test_a_layer_of_odd_sizes_is_widened_alone(tmp_path: Path) -> None:
    """192 inputs of the last projection are one block and a half; 192 outputs are multiplied, and not stacked."""
    plain = save(Form(ragged, BLOCKS, SIZES | {"intermediate_size": 192}), tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16").model
    assert len(linears(model)) == 8 and not any("down_proj" in path for path in linears(model))
    gate = linears(model)["model.layers.0.mlp.gate_proj"]
    assert torch.equal(gate.numbers(), plain.get_parameter("model.layers.0.mlp.gate_proj.weight"))
    down: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    assert torch.equal(down.weight, plain.get_parameter("model.layers.0.mlp.down_proj.weight").to(torch.bfloat16))


def add_predictor(folder: Path, source: str = "model.layers.0.", name: str = "mtp.layers.0.", quantized: bool = True) -> None:
    """Add a layer that predicts further tokens: that of `source`, with other scales, or without any and in bfloat16."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    own = {stored: 3 * tensor if "scale" in stored else tensor for stored, tensor in tensors.items() if stored.startswith(source)}
    if not quantized:
        own = {stored: tensor.to(torch.bfloat16) for stored, tensor in own.items() if "scale" not in stored}
    own = {name + stored.removeprefix(source): tensor.clone() for stored, tensor in own.items()}
    save_file(tensors | own, path, metadata={"format": "pt"})


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_layers_of_a_predictor_are_not_the_decoders(
    capability: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "capability_of", lambda device: capability)
    save(IN_BLOCKS, tmp_path)
    before = trial_logits(load_model(str(tmp_path), dtype="bfloat16").model)
    add_predictor(tmp_path)
    assert torch.equal(trial_logits(load_model(str(tmp_path), dtype="bfloat16").model), before)


def test_layers_of_two_lists_are_not_each_others() -> None:
    """As Gemma 3n's `altup_projections` and `altup_unembed_projections`."""
    names = [f"model.altup_{name}projections.0.{part}" for name in ("", "unembed_") for part in ("weight", "weight_scale_inv")]
    found = Float8(config_of({}), names).layers
    assert found == {"altup_projections.0": "model.altup_projections.0.weight", "altup_unembed_projections.0": names[2]}


def test_layers_of_a_list_with_another_name_are_told_apart() -> None:
    """As in StarCoder and Falcon."""
    names = [f"transformer.h.{layer}.attn.c_attn.{part}" for layer in (0, 1) for part in ("weight", "weight_scale_inv")]
    assert Float8(config_of({}), names).layers == {"h.0.attn.c_attn": names[0], "h.1.attn.c_attn": names[2]}


def test_a_linear_layer_with_a_product_of_its_own_keeps_it() -> None:
    """As DeepSeek V4's output projection, of which each group of heads has a part."""

    class Grouped(torch.nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return super().forward(states).flip(-1)

    model = model_of(Grouped(128, 128))
    Float8(config_of({}), ["layers.0.o_proj.weight", "layers.0.o_proj.weight_scale_inv"]).prepare(model)
    assert isinstance(model.get_submodule("layers.0.o_proj"), Grouped)


def model_of(layer: torch.nn.Module) -> Any:
    """Return a model of one layer."""
    model: Any = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"o_proj": layer})])
    model.get_output_embeddings = lambda: None
    return model


def config_of(changes: dict[str, Any], about: dict[str, Any] = BLOCKS, kind: str = "llama") -> PretrainedConfig:
    config = AutoConfig.for_model(kind, num_attention_heads=4, num_key_value_heads=2, **(SIZES | changes))
    config.quantization_config = about
    return config


@pytest.mark.parametrize(
    ("config", "dtype", "ranks", "reason"),
    [
        (config_of({}), torch.bfloat16, 1, ""),
        (config_of({}, AUTO_FP8), torch.bfloat16, 2, ""),
        (config_of({"num_experts": 4, "head_dim": 128}, kind="qwen3_moe"), torch.bfloat16, 2, ""),
        (config_of({"head_dim": 128, "shared_expert_intermediate_size": 256}, kind="qwen3_5_moe_text"), torch.bfloat16, 2, ""),
        (config_of({"head_dim": 128, "shared_expert_intermediate_size": 128}, kind="qwen3_5_moe_text"), torch.bfloat16, 2, "128 outputs"),
        (config_of({}), torch.float16, 1, "products of float8 are for --dtype bfloat16"),
        (config_of({}, FORMS["float8 in blocks"].about), torch.bfloat16, 1, "its blocks are of 16 by 32, and products are for 128 by 128"),
        (config_of({}), torch.bfloat16, 2, "128 outputs or inputs of a layer on 2 ranks are no whole blocks of 128"),
        (config_of({}, BLOCKS | {"modules_to_convert": ["embed_tokens"]}), torch.bfloat16, 1, "it has other modules"),
    ],
)
def test_what_cannot_stay_says_why(config: PretrainedConfig, dtype: torch.dtype, ranks: int, reason: str) -> None:
    found = Float8(config, []).reason_to_widen(Target(dtype, (9, 0), ranks=ranks))
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_a_device_that_multiplies_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "multiplies", lambda _: True)
    cpu = torch.device("cpu")
    assert find_problem(cpu) == "" and find_problem(cpu, blocks=False) == ""
    monkeypatch.setattr(Fp8BlockLinear, "multiply", lambda layer, rounded: explicit(layer, rounded._replace(scale=rounded.scale.flip(1))))
    assert "% off" in find_problem(cpu)
    monkeypatch.undo()
    assert find_problem(cpu) == "the GPU multiplies no float8 (compute capability below 8.9)"

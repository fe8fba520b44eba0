"""Float8 checkpoints that stay in 8 bits: their own numbers and scales, and products with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lora import save_adapter
from tests.worker.exactness.harness import Engine, generate, make_prompts
from tests.worker.model.checkpoints import DYNAMIC, EIGHT, FORMS, KEPT, STATIC, Form, compressed, fp8, save_quantized
from tests.worker.model.fusing import stack_projections
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.lora.layers import adaptable_layers
from fairlead_worker.model import fp8_layers, quantized
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.packed import can_pack, pack_linears
from fairlead_worker.model.trial import trial_logits
from fairlead_worker.native.library import native

PROMPTS = make_prompts()[:9]
ROUNDED = KEPT["a scale for each output, inputs rounded"]


@pytest.fixture(autouse=True)
def packages() -> None:
    for package in ("compressed_tensors", "accelerate", "torchao"):
        pytest.importorskip(package, reason="the extra gpu is not installed")


@pytest.fixture
def multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this device multiplies float8; torch does it on CPUs too, slowly."""
    monkeypatch.setattr(fp8_layers, "multiplies", lambda _: True)


def projections(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers that are neither stacked nor packed."""
    return {name: module for name, module in model.named_modules() if name.endswith("_proj") and type(module) is nn.Linear}


def numbers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the content of torchao's tensor: float8 [outputs, inputs] and float32 [outputs, 1]."""
    held: Any = weight
    return held.qdata, held.scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", KEPT.values(), ids=KEPT)
def test_weights_are_the_files_own(form: Form, dtype: str, tmp_path: Path) -> None:
    plain = save_quantized(form, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    model = load_model(str(tmp_path), dtype=dtype, quantization="fp8").model
    layers = projections(model)
    assert len(layers) == 14
    for name, layer in layers.items():
        small, scale = numbers(layer.weight)
        assert small.nbytes == layer.in_features * layer.out_features and [*dict(layer.named_parameters())] == ["weight"]
        assert torch.equal(small.view(torch.uint8), stored[f"{name}.weight"].view(torch.uint8))
        assert torch.equal(scale, stored[f"{name}.weight_scale"].view(-1, 1).expand_as(scale)), "as precise as in the file"
        wide: Any = layer.weight
        assert torch.equal(wide.dequantize(), plain.get_parameter(f"{name}.weight").to(getattr(torch, dtype)))
        assert not quantized.is_plain(layer) and not hasattr(layer, "quantization_scheme")
    packs = native() is not None or can_pack(getattr(torch, dtype))
    assert (type(model.get_submodule("lm_head")) is nn.Linear) is not packs, "what the checkpoint leaves wide is packed as ever"


@pytest.mark.parametrize("form", KEPT.values(), ids=KEPT)
def test_they_say_what_the_widened_numbers_say(form: Form, tmp_path: Path) -> None:
    model = save_quantized(form, tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", quantization="fp8")
    assert Engine(loaded, chunk=64).serve(PROMPTS) == generate(model, PROMPTS)


def test_inputs_are_rounded_by_the_largest_of_each_token(multiplies: None, tmp_path: Path) -> None:
    """Compare with an explicit computation, and with compressed-tensors on dequantized weights."""
    save_quantized(ROUNDED, tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16").model
    generator = torch.Generator().manual_seed(3)
    for layer in projections(model).values():
        small, scale = numbers(layer.weight)
        inputs = torch.randn(2, 5, layer.in_features, generator=generator).to(torch.bfloat16)
        inputs[0, 1] *= 100  # a token with another scale
        step = (inputs.abs().amax(-1, keepdim=True) / 448).float()
        rounded = (inputs.float() / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
        want, unrounded = (each @ (small.float() * scale).T for each in (rounded, inputs.float()))
        got = layer(inputs).float()
        assert ((got - want).abs() <= 2**-8 * want.abs().amax(-1, keepdim=True)).all()
        assert (got - want).square().mean() < (got - unrounded).square().mean() / 100
        alone = torch.cat([layer(inputs[0, token].view(1, 1, -1)) for token in range(5)], 1).float()
        # Not equal bits: on some CPUs torch multiplies one token in another order than five.
        assert ((alone - got[:1]).abs() <= 2**-8 * got[:1].abs().amax(-1, keepdim=True)).all(), "other tokens do not change its scale"
        assert not layer(torch.zeros_like(inputs)).any() and layer(inputs[:, :0]).shape == (2, 0, layer.out_features)


def test_a_model_that_multiplies_float8_is_near_the_widened_one(multiplies: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_quantized(ROUNDED, tmp_path)
    narrow = load_model(str(tmp_path), dtype="bfloat16").model
    assert not [name for name, _ in narrow.named_parameters() if name.endswith("_scale")]
    monkeypatch.setattr(fp8_layers, "multiplies", lambda _: False)
    wide = load_model(str(tmp_path), dtype="bfloat16").model
    assert all(hasattr(layer, "quantization_scheme") for layer in projections(wide).values())
    got, want = trial_logits(narrow).float(), trial_logits(wide).float()
    assert (got - want).square().mean() < 0.01 * want.square().mean()


def test_nothing_is_widened_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise loading would need the memory of the dequantized model, or of its largest layer."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    save_quantized(ROUNDED, tmp_path)
    widened: list[Any] = []
    monkeypatch.setattr(compressors.BaseCompressor, "decompress_module", lambda module, **_: widened.append(module))
    load_model(str(tmp_path), quantization="fp8")
    assert not widened


def test_on_a_cpu_they_are_widened_unless_asked_for(tmp_path: Path) -> None:
    """And packed for much faster kernels."""
    save_quantized(KEPT["a scale for each output"], tmp_path)
    model = load_model(str(tmp_path), dtype="float32").model
    assert not projections(model)


def test_without_torchao_they_are_widened(multiplies: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    save_quantized(ROUNDED, tmp_path)
    monkeypatch.setattr(fp8_layers, "find_spec", lambda _: None)
    model = load_model(str(tmp_path), dtype="bfloat16").model
    assert all(hasattr(layer, "quantization_scheme") for layer in projections(model).values())
    assert "float8 weights are widened to bfloat16: to keep them in 8 bits takes the package torchao" in caplog.text


def test_sizes_that_gpus_do_not_multiply_are_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer or another: those of a rank's part may be odd."""
    save_quantized(replace(ROUNDED, changes={"intermediate_size": 72}), tmp_path)
    monkeypatch.setattr(fp8_layers, "multiplies", lambda weight: all(size % fp8_layers.TILE == 0 for size in weight.shape))
    layers = projections(load_model(str(tmp_path), dtype="bfloat16").model)
    wide = {name.rpartition(".")[2] for name, layer in layers.items() if type(layer.weight) is nn.Parameter}
    assert wide == {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    "form", [STATIC, DYNAMIC, FORMS["float8 in blocks of compressed-tensors"]], ids=["inputs by a fixed scale", "int8", "blocks"]
)
def test_other_schemes_are_not_kept(form: Form, multiplies: None, tmp_path: Path) -> None:
    save_quantized(form, tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16").model
    assert all(type(layer.weight) is nn.Parameter for layer in projections(model).values())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ModelLoadError, match="its weights are quantized already: leave out --quantization fp8"):
        load_model(str(tmp_path), quantization="fp8")


def test_layers_stay_apart_and_take_adapters(multiplies: None, tmp_path: Path) -> None:
    save_quantized(ROUNDED, tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16").model
    assert stack_projections(model) == 0 and pack_linears(model) == 0
    assert len(adaptable_layers(model)) == 14


def test_what_an_adapter_adds_is_added_to_them(tmp_path: Path) -> None:
    model = save_quantized(ROUNDED, tmp_path / "base")
    loaded = load_model(str(tmp_path / "base"), dtype="float32", quantization="fp8")
    assert len(projections(loaded.model)) == 14
    own = generate(model, PROMPTS)
    merged = generate(save_adapter(model, tmp_path / "adapter", 3), PROMPTS)
    adapters = AdapterSet(loaded, 1, 16)
    adapters.load(1, "other", str(tmp_path / "adapter"), tmp_path / "adapter")
    asked = [index % 2 for index in range(len(PROMPTS))]
    want = [(own, merged)[number][index] for index, number in enumerate(asked)]
    assert own != merged and Engine(loaded, chunk=64, adapters=adapters).serve(PROMPTS, adapters=asked) == want


def test_the_head_stays_wide_even_where_it_is_quantized(tmp_path: Path) -> None:
    """Rows of it are taken apart, and it may be the embedding."""
    about = compressed("float-quantized", EIGHT | {"strategy": "channel"}) | {"ignore": []}
    plain = save_quantized(Form(fp8, about), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    parts, wide = fp8(tensors.pop("lm_head.weight"))
    save_file(tensors | {f"lm_head.{name}": part.contiguous() for name, part in parts.items()}, path, metadata={"format": "pt"})
    plain.get_parameter("lm_head.weight").data.copy_(wide)
    loaded = load_model(str(tmp_path), dtype="float32", quantization="fp8")
    assert len(projections(loaded.model)) == 14 and type(loaded.model.get_submodule("lm_head")) is not nn.Linear
    assert Engine(loaded, chunk=64).serve(PROMPTS) == generate(plain, PROMPTS)


@pytest.mark.parametrize("own", [None, ["gate"]])
def test_scales_are_exact_in_any_family_and_nothing_of_it_stays(own: list[str] | None) -> None:
    """Also in one that names parameters of its own, and where the load fails."""

    class Family(LlamaForCausalLM):
        if own:
            _keep_in_fp32_modules_strict = own

    with pytest.raises(OSError), fp8_layers.exact_scales(Family, True):
        assert Family._keep_in_fp32_modules_strict == [*(own or []), "weight_scale"]
        raise OSError
    assert Family.__dict__.get("_keep_in_fp32_modules_strict") == own

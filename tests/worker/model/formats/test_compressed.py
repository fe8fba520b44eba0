"""Float8 checkpoints of compressed-tensors that stay in 8 bits: their own numbers and scales, and products with them."""

from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lora import save_adapter
from tests.worker.exactness.harness import Engine, generate, make_prompts
from tests.worker.model.checkpoints import DYNAMIC, EIGHT, FORMS, KEPT, STATIC, Form, compressed, fp8, save_quantized
from tests.worker.model.formats.alone import pretend_gpu
from tests.worker.model.fusing import stack_projections
from torch import nn
from transformers import PreTrainedModel

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.lora.layers import adaptable_layers
from fairlead_worker.model.formats.compressed import CompressedTensors, RoundingLinear, Targets
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.lowbit.linear import Fp8Linear, Fp8WeightLinear
from fairlead_worker.model.lowbit.rows import TorchRounder, dequantized
from fairlead_worker.model.packed import can_pack, pack_linears
from fairlead_worker.model.trial import trial_logits
from fairlead_worker.native.library import native

PROMPTS = make_prompts()[:9]
ROUNDED = KEPT["a scale for each output, inputs rounded"]


@pytest.fixture(autouse=True)
def packages() -> None:
    pytest.importorskip("compressed_tensors", reason="the extra gpu is not installed")


@pytest.fixture
def multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this device multiplies float8; torch does it on CPUs too, slowly."""
    pretend_gpu(monkeypatch)


def projections(model: PreTrainedModel) -> dict[str, Fp8WeightLinear]:
    """Return the linear layers in float8."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Fp8WeightLinear)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", KEPT.values(), ids=KEPT)
def test_weights_are_the_files_own(form: Form, dtype: str, tmp_path: Path) -> None:
    plain = save_quantized(form, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    model = load_model(str(tmp_path), dtype=dtype, quantization="fp8").model
    layers = projections(model)
    assert len(layers) == 14 and {type(layer) for layer in layers.values()} == {Fp8WeightLinear}
    for name, layer in layers.items():
        assert layer.weight.nbytes == layer.in_features * layer.out_features and [*dict(layer.named_parameters())] == ["weight"]
        assert torch.equal(layer.weight.view(torch.uint8), stored[f"{name}.weight"].view(torch.uint8))
        assert torch.equal(layer.scale, stored[f"{name}.weight_scale"].view(-1, 1).expand_as(layer.scale)), "as precise as in the file"
        assert torch.equal(layer.numbers(), plain.get_parameter(f"{name}.weight"))
    packs = native() is not None or can_pack(getattr(torch, dtype))
    assert (type(model.get_submodule("lm_head")) is nn.Linear) is not packs, "what the checkpoint leaves wide is packed as ever"


@pytest.mark.parametrize("form", KEPT.values(), ids=KEPT)
def test_they_say_what_the_widened_numbers_say(form: Form, tmp_path: Path) -> None:
    model = save_quantized(form, tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", quantization="fp8")
    assert Engine(loaded, chunk=64).serve(PROMPTS) == generate(model, PROMPTS)


def test_inputs_are_rounded_by_the_largest_of_each_token(multiplies: None, tmp_path: Path) -> None:
    """Compare with an explicit computation."""
    save_quantized(ROUNDED, tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16").model
    generator = torch.Generator().manual_seed(3)
    layers = projections(model)
    assert len(layers) == 8 and {type(layer) for layer in layers.values()} == {Fp8Linear}, "projections of one input are stacked"
    for layer in layers.values():
        inputs = torch.randn(2, 5, layer.in_features, generator=generator).to(torch.bfloat16)
        inputs[0, 1] *= 100  # a token with another scale
        rounded = dequantized(TorchRounder().round(inputs)).view(inputs.shape)
        want, unrounded = (each @ layer.numbers().T for each in (rounded, inputs.float()))
        got = layer(inputs).float()
        assert ((got - want).abs() <= 2**-8 * want.abs().amax(-1, keepdim=True)).all()
        assert (got - want).square().mean() < (got - unrounded).square().mean() / 100
        alone = torch.cat([layer(inputs[0, token].view(1, 1, -1)) for token in range(5)], 1).float()
        # Not equal bits: on some CPUs torch multiplies one token in another order than five.
        assert ((alone - got[:1]).abs() <= 2**-8 * got[:1].abs().amax(-1, keepdim=True)).all(), "other tokens do not change its scale"
        assert not layer(torch.zeros_like(inputs)).any() and layer(inputs[:, :0]).shape == (2, 0, layer.out_features)


def test_a_model_that_multiplies_float8_is_near_the_widened_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_quantized(ROUNDED, tmp_path)
    wide = load_model(str(tmp_path), dtype="bfloat16").model
    assert sum(isinstance(layer, RoundingLinear) for layer in wide.modules()) == 14
    pretend_gpu(monkeypatch)
    narrow = load_model(str(tmp_path), dtype="bfloat16").model
    got, want = trial_logits(narrow).float(), trial_logits(wide).float()
    assert (got - want).square().mean() < 0.01 * want.square().mean()


def test_nothing_is_widened_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise loading would need the memory of the dequantized model, or of its largest layer."""
    save_quantized(ROUNDED, tmp_path)
    monkeypatch.setattr(CompressedTensors, "widen", lambda *_: 1 / 0)
    assert len(projections(load_model(str(tmp_path), quantization="fp8").model)) == 14


def test_on_a_cpu_they_are_widened_unless_asked_for(tmp_path: Path) -> None:
    """And packed for much faster kernels."""
    save_quantized(KEPT["a scale for each output"], tmp_path)
    model = load_model(str(tmp_path), dtype="float32").model
    assert not projections(model)


def test_sizes_that_gpus_do_not_multiply_are_widened(multiplies: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of one layer or another: those of a rank's part may be odd."""
    save_quantized(replace(ROUNDED, changes={"intermediate_size": 72}), tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16").model
    assert "4 layers are widened to bfloat16: 72 outputs and 64 inputs are no multiples of 16" in caplog.text
    wide = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, RoundingLinear)}
    assert wide == {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    "form", [STATIC, DYNAMIC, FORMS["float8 in blocks of compressed-tensors"]], ids=["inputs by a fixed scale", "int8", "blocks"]
)
def test_other_schemes_are_not_kept(form: Form, multiplies: None, tmp_path: Path) -> None:
    save_quantized(form, tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16").model
    assert not projections(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ModelLoadError, match="its weights are quantized already: leave out --quantization fp8"):
        load_model(str(tmp_path), quantization="fp8")


def test_widened_layers_stay_apart_and_take_adapters(tmp_path: Path) -> None:
    save_quantized(ROUNDED, tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16", quantization="fp8").model
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


def test_targets_are_those_of_the_library() -> None:
    is_match = import_module("compressed_tensors.utils.match").is_match
    lists = [["Linear"], ["Module"], ["Conv1d"], ["re:.*down", "lm_head"], ["layers.0.mlp.up"], ["layers.0"], ["re:up", "re:^lm_.*d$"], []]
    for layer, targets in product(("layers.0.mlp.down", "layers.0.mlp.up", "lm_head", "up"), lists):
        assert Targets(targets).match(layer) == is_match(layer, nn.Linear(1, 1), targets), (layer, targets)


def test_a_pattern_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    about = FORMS["int4 in groups"].about | {"ignore": ["re:*gate"]}
    save_quantized(replace(FORMS["int4 in groups"], about=about), tmp_path)
    with pytest.raises(ModelLoadError, match=r"a pattern that cannot be read: '\*gate': nothing to repeat"):
        load_model(str(tmp_path))

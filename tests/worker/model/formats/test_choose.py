"""Quantized weights: a loaded model computes with the numbers of its files, and unsupported formats are rejected by name."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.models import save_model
from tests.worker.exactness.harness import Engine, generate, make_prompts
from tests.worker.model.checkpoints import ACT_ORDER, DYNAMIC, FORMS, STATIC, WHOLE_ROWS, Form, save_quantized
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.decoder import Decoder
from fairlead_worker.model.formats import choose
from fairlead_worker.model.formats.compressed import RoundingLinear
from fairlead_worker.model.formats.mxfp4 import Mxfp4
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.lowbit.linear import is_plain
from fairlead_worker.model.trial import trial_logits

PROMPTS = make_prompts()[:9]


FURTHER = {"GPTQ with act-order": ACT_ORDER, "GPTQ with a scale for each output": WHOLE_ROWS}


@pytest.mark.parametrize("form", (FORMS | FURTHER).values(), ids=FORMS | FURTHER)
def test_a_checkpoint_says_what_its_numbers_say(form: Form, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="the extra gpu is not installed")
    model = save_quantized(form, tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    assert loaded.dtype == torch.float32
    assert Engine(loaded, chunk=64).serve(PROMPTS) == generate(model, PROMPTS)


@pytest.mark.parametrize("name", ["float8 in blocks", "float8, a scale for each tensor", "int4 in groups"])
def test_scales_of_float32_leave_the_dtype_of_the_model(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="the extra gpu is not installed")
    plain = save_quantized(FORMS[name], tmp_path)
    got, want = trial_logits(load_model(str(tmp_path), dtype="bfloat16").model), trial_logits(plain)
    assert got.dtype == torch.bfloat16 and (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("form", [DYNAMIC, STATIC], ids=["of each token", "by one scale"])
def test_inputs_that_are_rounded_stay_so(form: Form, tmp_path: Path) -> None:
    """In bfloat16 a layer that does not round them is near enough to be taken for the same one."""
    pytest.importorskip("compressed_tensors", reason="the extra gpu is not installed")
    save_quantized(form, tmp_path)
    model = load_model(str(tmp_path), dtype="bfloat16").model
    assert sum(isinstance(module, RoundingLinear) for module in model.modules()) == 14
    layer = model.get_submodule("model.layers.1.self_attn.q_proj")
    inputs = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    inputs[1] *= 100  # a token with another scale, if each has its own
    plain, rounded = inputs.float() @ layer.weight.float().T, layer(inputs).float()
    assert 1e-3 < ((rounded - plain).norm(dim=1) / plain.norm(dim=1)).min() < 0.1


def test_fp8_is_made_at_load(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="the extra gpu is not installed")
    model = save_model("llama", tmp_path)
    loaded = load_model(str(tmp_path), quantization="fp8")
    for name, module in loaded.model.named_modules():
        if name.endswith("_proj"):
            assert not is_plain(module)
            model.get_parameter(f"{name}.weight").data.copy_(module.weight.dequantize())
    assert Engine(loaded, chunk=64).serve(PROMPTS) == generate(model, PROMPTS)


LEAN = """
import sys
from fairlead_worker.model.lean import import_transformers
import_transformers()
from fairlead_worker.model.loader import load_model
load_model(sys.argv[1])
assert not [name for name in sys.modules if name.startswith(("torchao", "torch._dynamo", "sympy"))]
loaded = load_model(sys.argv[1], quantization="fp8")
print(type(loaded.model.get_submodule("model.layers.0.mlp.down_proj").weight).__module__)
"""


def test_torchao_and_the_compiler_are_imported_only_for_who_wants_them(tmp_path: Path) -> None:
    """As an engine does it, in a process of its own; --quantization finds it all the same."""
    pytest.importorskip("torchao", reason="the extra gpu is not installed")
    save_model("llama", tmp_path)
    done = subprocess.run([sys.executable, "-c", LEAN, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.strip().startswith("torchao."), done.stderr


@pytest.mark.parametrize(
    ("quantization", "method", "cause"),
    [
        ("fp8", "", "--quantization fp8, which needs the package torchao, and that is not installed"),
        ("none", "compressed-tensors", r"quantized \(compressed-tensors\), which needs the package compressed-tensors, and that is not"),
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
    missing = {"torchao", "compressed_tensors"}
    monkeypatch.setattr(choose, "find_spec", lambda name: None if name in missing else name)
    with pytest.raises(ModelLoadError, match=cause):
        load_model(str(tmp_path), quantization=quantization)


@pytest.mark.parametrize("about", [None, {"quant_method": "compressed-tensors"}], ids=["says nothing", "names no groups"])
def test_scales_that_nothing_is_said_of_are_not_left_out(about: dict[str, str] | None, tmp_path: Path) -> None:
    """Weights without their scales would be read as if they were plain, and answer nonsense."""
    pytest.importorskip("compressed_tensors", reason="the extra gpu is not installed")
    save_quantized(FORMS["float8, a scale for each output"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config | ({"quantization_config": about} if about else {})))
    with pytest.raises(
        ModelLoadError, match=r"it has model\.layers\.0\..*weight_scale, as quantized weights do, and its config.json does not"
    ):
        load_model(str(tmp_path))


def test_groups_in_any_order_are_refused(tmp_path: Path) -> None:
    """GPTQ's act-order, which compressed-tensors gave up."""
    pytest.importorskip("compressed_tensors", reason="the extra gpu is not installed")
    form = FORMS["int4 in groups"]
    save_quantized(form, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"group_size": 32', '"group_size": 32, "actorder": "group"'))
    with pytest.raises(ModelLoadError, match=r"its quantization_config cannot be read: .*actorder"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("form", "lost", "cause"),
    [
        ("GPTQ", "scales", "has {}.qweight, and no file has {}.scales"),
        ("GPTQ", "qweight", "has {}.scales, and no file has {}.qweight"),
        ("GPTQ", "qzeros", "has {}.qweight, and no file has {}.qzeros"),
        ("GPTQ with act-order", "g_idx", "has {}.qweight, and no file has {}.g_idx"),
        ("AWQ", "qzeros", "has {}.qweight, and no file has {}.qzeros"),
        ("int4 in groups with zero points", "weight_scale", "has {}.weight_packed, and no file has {}.weight_scale"),
        ("int4 in groups with zero points", "weight_packed", "has {}.weight_scale, and no file has {}.weight or {}.weight_packed"),
        ("int4 in groups with zero points", "weight_zero_point", "has {}.weight_scale, and no file has {}.weight_zero_point"),
        ("float8, a scale for each output", "weight_scale", "{}.weight of model.safetensors is in float8, and no file has its scale"),
        ("float8 in blocks", "weight_scale_inv", "{}.weight of model.safetensors is in float8, and no file has its scale"),
        ("float8 in blocks", "weight", "has {}.weight_scale_inv, and no file has {}.weight"),
    ],
)
def test_a_quantized_weight_that_lacks_a_tensor_is_refused_by_name(form: str, lost: str, cause: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="the extra gpu is not installed")
    save_quantized((FORMS | FURTHER)[form], tmp_path)
    layer, path = "model.layers.1.mlp.down_proj", tmp_path / "model.safetensors"
    left = {name: tensor for name, tensor in load_file(path).items() if name != f"{layer}.{lost}"}
    save_file(left, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError) as refused:
        load_model(str(tmp_path))
    text = str(refused.value)
    assert cause.replace("{}", layer) in text and "model.safetensors" in text and "download the checkpoint again" in text


def test_mxfp4_needs_blocks_and_scales() -> None:
    names = [f"model.layers.0.mlp.experts.{name}" for name in ("down_proj_blocks", "down_proj_scales", "gate_up_proj_blocks")]
    assert Mxfp4(names).find_missing(names) == (names[2], "model.layers.0.mlp.experts.gate_up_proj_scales")
    assert Mxfp4(names).find_missing(names[:2]) is None


@pytest.fixture
def torchaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PreTrainedModel]:
    """Writes a checkpoint of torchao, with transformers' writer, which the worker leaves out."""
    torchao = pytest.importorskip("torchao.quantization", reason="the extra gpu is not installed")
    writer = import_module("torchao.prototype.safetensors.safetensors_support").flatten_tensor_state_dict
    monkeypatch.setattr("transformers.quantizers.quantizer_torchao.flatten_tensor_state_dict", writer, raising=False)

    def make(kind: str, family: str = "llama") -> PreTrainedModel:
        save_model(family, tmp_path / "plain")
        given = {"quantization_config": TorchAoConfig(getattr(torchao, kind)()), "device_map": {"": "cpu"}}
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16, **given)
        model.save_pretrained(tmp_path)
        return model

    return make


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_checkpoint_of_torchao_stays_as_it_is(kind: str, torchaos: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    want = trial_logits(torchaos(kind)).float()
    loaded = load_model(str(tmp_path))
    assert loaded.dtype == torch.bfloat16 and not is_plain(loaded.model.get_submodule("model.layers.1.mlp.down_proj"))
    assert (trial_logits(loaded.model).float() - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_a_checkpoint_of_torchao_keeps_names_that_other_files_lose(
    family: str, torchaos: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    """transformers reads its files itself, so that its own class, with its own names, runs it."""
    want = trial_logits(torchaos("Int8WeightOnlyConfig", family)).float()
    loaded = load_model(str(tmp_path))
    assert not isinstance(loaded.model, Decoder)
    assert (trial_logits(loaded.model).float() - want).norm() <= 0.02 * want.norm()


def test_a_weight_of_torchao_that_lacks_a_tensor_is_in_the_log(torchaos: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    torchaos("Float8WeightOnlyConfig")
    path = tmp_path / "model.safetensors"
    with safe_open(path, framework="pt") as stored:
        about = stored.metadata()
    left = {name: tensor for name, tensor in load_file(path).items() if "layers.1.mlp.down_proj._weight_scale" not in name}
    save_file(left, path, metadata=about)
    with pytest.raises(ModelLoadError, match=r"The log names each weight that torchao could not make \(CONVERSION\): download the "):
        load_model(str(tmp_path))


def test_weights_of_torchao_without_a_product_are_refused(torchaos: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    torchaos("Float8WeightOnlyConfig")
    cause = r"quantized \(torchao, Float8Tensor\), and torchao does not multiply them in float32 on CPU: RuntimeError: .*; set --dtype"
    with pytest.raises(ModelLoadError, match=cause):
        load_model(str(tmp_path), dtype="float32")

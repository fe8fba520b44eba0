"""AWQ, GPTQ and packed compressed-tensors: which layers stay in 4 bits, with which numbers, on how many ranks, and why others do not."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.checkpoints import ACT_ORDER, AWQ, FORMS, GPTQ, IN_ORDER, WHOLE_ROWS, Form, awq, gptq, save_quantized
from tests.worker.model.formats.alone import Alone, pretend_gpu
from tests.worker.model.lowbit.int4_reference import multiply
from transformers import PreTrainedModel

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model import loader
from fairlead_worker.model.formats.base import Pending
from fairlead_worker.model.layers.stack import Stack
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.lowbit import int4
from fairlead_worker.model.lowbit.int4 import Int4Linear, Kernels
from fairlead_worker.model.trial import trial_logits

FOUR_BITS = {name: form for name, form in IN_ORDER.items() if "8 bits" not in name} | {
    "GPTQ with act-order": ACT_ORDER,
    "GPTQ with a scale for each output": WHOLE_ROWS,
    "compressed-tensors": FORMS["int4 in groups"],
    "compressed-tensors with zero points": FORMS["int4 in groups with zero points"],
}
STACKS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this device has the kernel."""
    pytest.importorskip("compressed_tensors", reason="the extra gpu is not installed")
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(int4, "kernels", lambda device: Kernels(int4.widen))
    monkeypatch.setattr(Int4Linear, "multiply", multiply)


def linears(model: PreTrainedModel) -> dict[str, Int4Linear]:
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, Int4Linear)}


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Within the rounding of scales, zeros and numbers to bfloat16: at most 2**-8 of 8 + 8 + 15 steps, whose largest is 1/7 of a weight."""
    return bool((got - want).abs().max() <= 2**-8 * 31 / 7 * want.abs().max())


@pytest.mark.parametrize("form", FOUR_BITS.values(), ids=FOUR_BITS)
def test_layers_have_the_files_numbers(form: Form, gpu: None, tmp_path: Path) -> None:
    plain = save_quantized(form, tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.dtype == torch.bfloat16, "what the kernel computes in, whatever the file says"
    assert not loaded.rounds_inputs
    layers = linears(loaded.model)
    assert not any(isinstance(module, Pending) for module in loaded.model.modules())
    for path, layer in layers.items():
        parent = path.removesuffix(".linear").rpartition(".")[0]
        sources = STACKS.get(path.removeprefix(f"{parent}.").removesuffix(".linear"), (path.rpartition(".")[2],))
        want = torch.cat([plain.get_parameter(f"{parent}.{source}.weight") for source in sources])
        assert layer.weight.nbytes == want.numel() // 2 and near(layer.numbers(), want), path
    ordered = form is ACT_ORDER
    assert len(layers) == 8 and sum(isinstance(module, Stack) for module in loaded.model.modules()) == 4, ordered
    got, want = trial_logits(loaded.model).float(), trial_logits(plain).float()
    assert (got - want).norm() <= 0.05 * want.norm()


@pytest.mark.parametrize("form", [awq, gptq()], ids=["AWQ", "GPTQ"])
def test_the_parts_of_ranks_are_the_whole(form: Any, gpu: None, tmp_path: Path) -> None:
    plain = save_quantized(Form(form, AWQ if form is awq else GPTQ, {"intermediate_size": 256}), tmp_path)
    for rank in (0, 1):
        layers = linears(load_model(str(tmp_path), group=Alone(rank)).model)
        for name, dim in (("gate_up_proj.linear", 0), ("down_proj.layer", 1)):
            sources = STACKS["gate_up_proj"] if dim == 0 else ("down_proj",)
            weights = [plain.get_parameter(f"model.layers.1.mlp.{source}.weight") for source in sources]
            want = torch.cat([weight.narrow(dim, rank * 128, 128) for weight in weights])
            assert near(layers[f"model.layers.1.mlp.{name}"].numbers(), want)


@pytest.mark.parametrize(
    ("form", "options", "reason"),
    [
        (IN_ORDER["GPTQ in 8 bits"], {}, "gptq weights of 8 bits are widened to 16 bits or more: it has 8 bits"),
        (IN_ORDER["AWQ"], {"dtype": "float32"}, "the kernel computes in bfloat16, not in float32 (--dtype)"),
        (
            Form(gptq(group=16), GPTQ | {"group_size": 16}),
            {},
            "14 layers are widened to bfloat16: groups of 16 inputs are no multiples of 32",
        ),
        (
            replace(FORMS["int4 in groups"], family="qwen3_moe", changes=EXPERTS),
            {"dtype": "float32"},
            "experts have no kernel that reads 4 bits",
        ),
    ],
)
def test_what_cannot_stay_in_4_bits_is_widened_with_the_reason(
    form: Form,
    options: dict[str, Any],
    reason: str,
    gpu: None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.models import FAMILIES

    monkeypatch.setitem(FAMILIES, "qwen3_moe", ("qwen3_moe", FAMILIES["qwen3"][1]))
    plain = save_quantized(form, tmp_path)
    with caplog.at_level(logging.INFO):
        loaded = load_model(str(tmp_path), **options)
    assert reason in caplog.text and not linears(loaded.model)
    got, want = trial_logits(loaded.model).float(), trial_logits(plain).float()
    assert (got - want).norm() <= 0.02 * want.norm()


def test_a_device_without_the_kernel_widens(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU does without a warning."""
    caplog.set_level(logging.INFO)
    save_quantized(IN_ORDER["AWQ"], tmp_path)
    load_model(str(tmp_path))
    assert not any("widened" in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    monkeypatch.setattr(loader, "capability_of", lambda device: (7, 5))
    assert not linears(load_model(str(tmp_path)).model)
    assert "awq weights of 4 bits are widened to 16 bits or more: the GPU's compute capability is 7.5" in caplog.text


def test_a_quantized_head_is_widened(gpu: None, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    plain = save_quantized(IN_ORDER["AWQ"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    parts, wide = awq(tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{name}": tensor.contiguous() for name, tensor in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    head = load_model(str(tmp_path)).model.get_output_embeddings()
    assert not isinstance(head, Int4Linear) and head.out_features == plain.config.vocab_size
    assert torch.equal(head(torch.eye(wide.shape[1], dtype=torch.bfloat16)).T, wide.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("about", "cause"),
    [
        (AWQ | {"version": "gemv"}, r"quantized \(awq\) with its format 'gemv'; supported: gemm"),
        (AWQ | {"bits": 3}, r"quantized \(awq\) with bits 3; supported: 4"),
        (GPTQ | {"checkpoint_format": "marlin"}, r"quantized \(gptq\) with its format 'marlin'; supported: gptq, gptq_v2"),
        (GPTQ | {"bits": 2}, r"quantized \(gptq\) with bits 2; supported: 4, 8"),
        (GPTQ | {"group_size": 0}, r"quantized \(gptq\) with group_size 0; use -1 or a positive number"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"settings of their own \(dynamic\)"),
        (GPTQ | {"group_size": 64}, "weights cannot be loaded"),
    ],
)
def test_forms_that_are_not_read_are_refused_by_name(about: dict[str, Any], cause: str, tmp_path: Path) -> None:
    save_quantized(IN_ORDER["AWQ" if about["quant_method"] == "awq" else "GPTQ"], tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": about}))
    with pytest.raises(ModelLoadError, match=cause):
        load_model(str(tmp_path))


def test_experts_of_awq_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.models import FAMILIES

    monkeypatch.setitem(FAMILIES, "qwen3_moe", ("qwen3_moe", FAMILIES["qwen3"][1]))
    save_quantized(Form(awq, AWQ, EXPERTS, "qwen3_moe"), tmp_path)
    with pytest.raises(ModelLoadError, match=r"its experts are quantized \(awq: layers\.0\.mlp\.experts\.0\.\w+_proj\)"):
        load_model(str(tmp_path))


def test_groups_of_other_sizes_are_refused(tmp_path: Path) -> None:
    def uneven(weight: torch.Tensor) -> Any:
        parts, plain = gptq()(weight)
        parts["g_idx"][0] = parts["g_idx"][-1]
        return parts, plain

    save_quantized(Form(uneven, GPTQ | {"desc_act": True}), tmp_path)
    with pytest.raises(ModelLoadError, match=r"layers\.0\.\w+\.\w+_proj: its g_idx has groups of other sizes than 32"):
        load_model(str(tmp_path))

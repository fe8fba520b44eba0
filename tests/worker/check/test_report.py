"""`fairlead check` says of a model's config what a worker then does with the model: path, memory of weights and KV, or the refusal."""

import gc
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.gguf_models import small_model, write_gguf
from tests.models import build_model, save_model, save_refused
from tests.worker.model.checkpoints import FORMS, KEPT, Form, blocks, save_quantized
from tests.worker.model.formats.test_float8 import add_predictor

from fairlead_worker.build import build_runner, load
from fairlead_worker.check import report as checks
from fairlead_worker.check.gpus import GPUS, UnknownGpu, find_gpu
from fairlead_worker.check.memory import LiveBytes
from fairlead_worker.check.report import Report, check_model
from fairlead_worker.config import WorkerConfig
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.execution import memory
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.kernels.base import KVSpec
from fairlead_worker.kernels.registry import choose_backend
from fairlead_worker.model.catalog import REFUSED, SERVED
from fairlead_worker.model.formats.gguf import GgmlEmbedding
from fairlead_worker.native.library import native
from fairlead_worker.native.linear import NativeLinear
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.uri import resolve

needs_library = pytest.mark.skipif(native() is None, reason="the native library does not load here")
GIB = 1 << 30


def config_of(folder: Path, **settings: Any) -> WorkerConfig:
    return WorkerConfig(model=f"file://{folder}", **settings)


def held_bytes(runner: ModelRunner) -> int:
    """Return the bytes of all tensors of a loaded model, packed ones included."""
    storages: dict[int, int] = {}
    packed = 0
    for module in runner.loaded.model.modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        if isinstance(module, NativeLinear):
            packed += sum(part.nbytes for part in module.memory)
            own = [module.bias]
        if isinstance(module, GgmlEmbedding):  # of the mapped file
            own = [module.blocks]
        for tensor in own:
            if tensor is not None:
                storages[tensor.untyped_storage().data_ptr()] = tensor.nbytes
    return packed + sum(storages.values())


def check_against_a_worker(folder: Path, monkeypatch: pytest.MonkeyPatch, total: int, **settings: Any) -> tuple[Report, ModelRunner]:
    """Return the report for a machine of `total` bytes, and the runner that a worker makes there; both agree on path and memory."""
    config = config_of(folder, **settings)
    report = check_model(config, folder, None, memory=total)
    assert report.served, report.problem
    loaded = load(config)
    left: list[int] = []
    monkeypatch.setattr(memory, "free_memory", lambda: left[0])
    runner = build_runner(config.model_copy(update={"kv_pages": 1}), loaded)
    held = held_bytes(runner)
    left.append(total - report.process_bytes - held)
    runner = build_runner(config, loaded)
    spec = runner.backend.spec
    assert report.path == runner.path, report.path_reason
    assert (report.attention, report.kv_bytes_per_token) == (runner.backend.name, spec.num_groups * spec.page_bytes // spec.page_size)
    slots, most = runner.state_slots, config.max_num_seqs
    if slots is not None:
        most = slots.running
        assert report.state_bytes == pytest.approx(slots.all_bytes, rel=0.1) and report.state_bytes
    else:
        assert report.kv_groups == runner.kv_groups
    assert report.weight_bytes == pytest.approx(held, rel=0.02)
    assert report.kv_bytes == pytest.approx(runner.backend.pages * spec.page_bytes, rel=0.1)
    assert report.max_model_len == loaded.max_model_len and report.dtype == str(loaded.dtype).removeprefix("torch.")
    whole = report.kv_tokens // -(-(report.context - 1) // 16 * 16)
    assert report.streams == min(most, whole) if spec.num_groups == 1 else report.streams > whole
    gc.collect()
    return report, runner


@needs_library
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "tied qwen2",
        "gemma3",
        "gpt2",
        "phi3",
        "granite",
        "gpt_oss",
        "deepseek_v3",
        "qwen3_moe",
        "gemma4 (text)",
        "longcat_flash",
        "qwen3_next",
        "mamba2",
    ],
)
def test_a_worker_on_a_cpu_does_what_the_report_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(name, tmp_path)
    report, _ = check_against_a_worker(tmp_path, monkeypatch, 2 * GIB)
    assert report.mechanisms == SERVED[name].mechanisms and (report.path == "native") == (report.path_reason == "")


@needs_library
@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4", "dtype": "bfloat16"}], ids=str
)
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_with_weights_that_weigh(name: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that the KV, half of what is free, depends on them."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 4, "head_dim": 64}
    save_model(name, tmp_path, **sizes)
    report, _ = check_against_a_worker(tmp_path, monkeypatch, 900 << 20, **settings)
    assert report.weight_bytes > 10 << 20 and report.quantization == settings.get("quantization", "none")


@needs_library
def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(small_model("llama"), tmp_path / "model.gguf", "Q4_0")
    folder = resolve(f"file://{path}", cache=ModelCache(tmp_path / "cache"))
    report, _ = check_against_a_worker(folder, monkeypatch, GIB)
    assert report.quantization == "gguf"


def test_a_model_that_is_too_large_is_refused_with_what_would_help(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    small = check_model(config_of(tmp_path), tmp_path, None, memory=64 << 20)
    assert not small.served and "take a machine with more memory" in small.problem and "--quantization int8" in small.problem
    few = check_model(config_of(tmp_path, kv_pages=10), tmp_path, None, context=2000, memory=2 * GIB)
    assert not few.served and few.kv_tokens == 160
    assert "a request of 2000 tokens needs" in few.problem and "lower --max-model-len and --context to 160" in few.problem
    fits = check_model(config_of(tmp_path, kv_pages=10), tmp_path, None, context=160, memory=2 * GIB)
    assert fits.served and fits.streams == 1


@pytest.mark.parametrize("name", ["gptj", "minimax", "doge", "deepseek_v32", "llama with a classifier's head"])
def test_a_family_that_a_worker_refuses_is_refused_with_its_words(name: str, tmp_path: Path) -> None:
    save_refused(name, tmp_path)
    report = check_model(config_of(tmp_path), tmp_path, None, memory=2 * GIB)
    assert not report.served and REFUSED[name].reason in report.problem
    with pytest.raises(ModelLoadError) as error:
        load(config_of(tmp_path))
    assert error.value.cause == report.problem


@pytest.mark.parametrize(
    ("settings", "context", "says"),
    [
        ({}, 5000, r"--max-model-len 5000 is more than the model's 4096"),
        ({"kv_cache_dtype": "fp8"}, 0, r"--kv-cache-dtype fp8 is for GPUs"),
        ({"quantization": "int4", "dtype": "float16"}, 0, r"needs --dtype bfloat16 or float32"),
        ({"tensor_parallel_size": 3}, 0, r"it cannot be divided \(--tensor-parallel-size 3\): model.layers.0.self_attn: its 4 heads"),
    ],
    ids=str,
)
def test_settings_that_a_worker_refuses(settings: dict[str, Any], context: int, says: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    report = check_model(config_of(tmp_path, **settings), tmp_path, None, context, 2 * GIB)
    assert not report.served and re.search(says, report.problem), report.problem


def test_a_config_that_no_worker_reads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert "transformers has no causal LM for model_type 't5'" in check_model(config_of(tmp_path), tmp_path, None).problem
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}))
    assert "quantized (hqq), which is not supported" in check_model(config_of(tmp_path), tmp_path, None).problem


# --- GPUs

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096}
H100 = GPUS["H100"]


def test_on_a_gpu_weights_step_and_kv_fill_the_memory(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path, **SIZES)
    report = check_model(config_of(tmp_path, dtype="bfloat16"), tmp_path, H100, context=4096)
    assert report.served and report.attention == "flashinfer" and report.attention_reason == ""
    assert report.weight_bytes == pytest.approx(2 * sum(each.numel() for each in model.parameters()), rel=0.001)
    assert report.kv_bytes_per_token == 2 * 4 * 64 * 2 * 2
    # The logits of all rows that sample, in both dtypes, are part of the step.
    assert report.step_bytes > 256 * 4096 * (2 + 4)
    free = H100.total - report.weight_bytes - report.process_bytes
    room = min(free - report.step_bytes - H100.total // 64, free - int(0.08 * H100.total)) - checks.GRAPH_BYTES
    assert room - report.kv_bytes < 16 * report.kv_bytes_per_token
    assert report.kv_tokens == report.kv_bytes // report.kv_bytes_per_token and report.streams == 256


def test_a_gpu_with_little_memory_has_smaller_chunks(tmp_path: Path) -> None:
    """By the rule of the worker, for any speed. A size that is given holds."""
    save_model("llama", tmp_path, hidden_size=512, intermediate_size=4096, max_position_embeddings=1 << 14)
    large, small, given = (
        check_model(config_of(tmp_path, dtype="bfloat16", **settings), tmp_path, H100, memory=memory)
        for settings, memory in (({}, 0), ({}, 2 * GIB), ({"chunked_prefill_size": 3000}, 2 * GIB))
    )
    assert large.chunk_tokens == 8192 and large.step_tokens == 8192 + 256
    assert 512 <= small.chunk_tokens < 4096 and small.step_tokens == min(8192, 5 * small.chunk_tokens) + 256
    assert given.chunk_tokens == 3000


def test_shares_of_several_gpus(tmp_path: Path) -> None:
    save_model("llama", tmp_path, **SIZES)
    one, two = (check_model(config_of(tmp_path, dtype="bfloat16", tensor_parallel_size=n), tmp_path, H100) for n in (1, 2))
    embedding = 2 * 4096 * 512
    assert two.weight_bytes - embedding == pytest.approx((one.weight_bytes - embedding) / 2, rel=0.01), "only the embedding is whole"
    assert 2 * two.kv_bytes_per_token == one.kv_bytes_per_token


def test_quantized_while_loading_and_kv_in_8_bits(tmp_path: Path) -> None:
    save_model("llama", tmp_path, **SIZES)
    plain, fp8, int4 = (
        check_model(config_of(tmp_path, dtype="bfloat16", **settings), tmp_path, H100)
        for settings in ({}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}, {"quantization": "int4"})
    )
    whole = 2 * 2 * 4096 * 512  # embedding and head
    assert (fp8.weight_bytes - whole) == pytest.approx((plain.weight_bytes - whole) / 2, rel=0.02)
    assert (int4.weight_bytes - whole) == pytest.approx((plain.weight_bytes - whole) / 4, rel=0.1)
    assert 2 * fp8.kv_bytes_per_token == plain.kv_bytes_per_token and fp8.kv_dtype == "float8_e4m3fn"


BLOCKS = Form(
    blocks(128, 128, "weight_scale_inv"),
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"hidden_size": 256, "intermediate_size": 512},
)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (FORMS["AWQ"], "the GPU's compute capability is 7.5, and the kernel needs 8.0"),
        (FORMS["int4 in groups"], "the GPU's compute capability is 7.5, and the kernel needs 8.0"),
        (BLOCKS, "the GPU multiplies no float8 (compute capability below 8.9)"),
        (KEPT["a scale for each output, inputs rounded"], "no product here takes them as they are"),
    ],
    ids=["awq", "compressed-tensors", "float8 in blocks", "float8 of rows"],
)
def test_checkpoints_in_few_bits_stay_so_where_a_product_takes_them(form: Form, reason: str, tmp_path: Path) -> None:
    model = save_quantized(form, tmp_path)
    kept, widened = (check_model(config_of(tmp_path, dtype="bfloat16"), tmp_path, gpu) for gpu in (H100, GPUS["T4"]))
    assert kept.served and kept.quantization == f"{form.about['quant_method']}, kept"
    tensors = load_file(tmp_path / "model.safetensors")
    few = {name: tensor for name, tensor in tensors.items() if "_proj." in name}
    assert kept.weight_bytes == pytest.approx(
        sum(each.nbytes for each in few.values()) + 2 * sum(each.numel() for name, each in tensors.items() if name not in few), rel=0.01
    )
    assert widened.weight_bytes == pytest.approx(2 * sum(each.numel() for each in model.parameters()), rel=0.01)
    assert widened.quantization == f"{form.about['quant_method']} in its files, widened to bfloat16: {reason}"
    assert "in its files, widened to" in check_model(config_of(tmp_path), tmp_path, None, memory=2 * GIB).quantization


def test_layers_of_multi_token_prediction_are_not_counted(tmp_path: Path) -> None:
    save_quantized(BLOCKS, tmp_path)
    before = check_model(config_of(tmp_path, dtype="bfloat16"), tmp_path, H100)
    add_predictor(tmp_path)
    assert check_model(config_of(tmp_path, dtype="bfloat16"), tmp_path, H100) == before and before.served


def test_a_model_for_more_gpus_names_flags(tmp_path: Path) -> None:
    save_model("llama", tmp_path, **SIZES)
    report = check_model(config_of(tmp_path, dtype="bfloat16"), tmp_path, replace(GPUS["T4"], memory_mib=650))
    assert not report.served
    for advice in ("--quantization fp8", "--gpus 2", "--gpu T4"):
        assert advice in report.problem


def test_layers_that_flashinfer_does_not_support_are_named(tmp_path: Path) -> None:
    save_model("gpt_oss", tmp_path)
    report = check_model(config_of(tmp_path, dtype="bfloat16"), tmp_path, H100)
    assert report.attention == "reference" and "heads of 16" in report.attention_reason
    loaded = load(config_of(tmp_path, dtype="bfloat16"))
    assert choose_backend(KVSpec(loaded.layers, 16, loaded.dtype, torch.device("cuda")), True)[0] == report.attention


def test_names_of_gpus() -> None:
    assert find_gpu("h100") is find_gpu("NVIDIA H100") is GPUS["H100"] and find_gpu("rtx 4090") is GPUS["RTX-4090"]
    with pytest.raises(UnknownGpu, match="did you mean L40S"):
        find_gpu("l40x")


def test_live_bytes_counts_what_lives_once() -> None:
    known = torch.zeros(1000)
    with LiveBytes([known]) as live:
        kept = torch.empty(100, device="meta")
        known.view(10, 100).sum()
        for _ in range(5):
            torch.empty(1000, device="meta")
        kept.view(4, 25)
    assert live.peak == 400 + 4000 and live.now == 400
    del kept
    assert live.now == 0


def test_every_family_that_is_served_can_be_checked(tmp_path: Path) -> None:
    """But for those whose code reads numbers to choose experts."""
    refused = []
    for name in ("dbrx", "jetmoe", "jais2", "mimo_v2_flash", "modernbert-decoder", "dots1", "kolibri1", "gemma3n (text)"):
        folder = tmp_path / name
        build_model(name).save_pretrained(folder)
        report = check_model(config_of(folder), folder, None, memory=2 * GIB)
        if not report.served:
            assert "cannot be checked without weights" in report.problem
            refused.append(name)
        elif native() is not None:
            assert report.path == SERVED[name].path
    assert refused == ["dbrx", "jetmoe"]

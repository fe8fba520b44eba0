"""Models of GGUF files against the models that they were written from, and against transformers' own reading of the same file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tests.gguf_models import small_model, write_gguf
from tests.real_models import GEMMA3, real_folder, real_model
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from fairlead.packaged_model import SMOLLM2, PackagedModel
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.execution.forward import choose_forward
from fairlead_worker.execution.native_forward import NativeForward
from fairlead_worker.kernels.base import KVSpec
from fairlead_worker.kernels.native import NativeBackend
from fairlead_worker.model.exact import widened
from fairlead_worker.model.formats import gguf as reading
from fairlead_worker.model.formats.gguf import GgmlEmbedding
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.model.trial_text import TrialText, run_whole
from fairlead_worker.native.ggml import BLOCK_TYPES, GgmlLinear
from fairlead_worker.native.library import native
from fairlead_worker.weights.cache import ModelCache

CLOSE = 2e-5
"""Of the largest logit: sums of float32 in another order."""
needs_native = pytest.mark.skipif(native() is None, reason="the native library is not built, or not for this CPU")


def load(path: Path, tmp_path: Path, **settings: Any) -> LoadedModel:
    return load_model(path.as_uri(), cache=ModelCache(tmp_path / "cache"), **{"dtype": "float32", **settings})


def exact_logits(loaded: LoadedModel) -> torch.Tensor:
    """Return logits [P, vocabulary] of random tokens, computed in float32 from the numbers of the file."""
    with widened(loaded.model), torch.inference_mode():
        return run_whole(loaded.model, loaded.layers, tokens(loaded.vocabulary_size), torch.float32)


def tokens(vocabulary: int) -> TrialText:
    return TrialText.random(vocabulary)


def transformers_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([model(input_ids=text[None]).logits[0] for text in tokens(model.config.vocab_size).tokens])


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() <= CLOSE * want.abs().max()


@pytest.fixture(params=["in blocks", "widened"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Load the file as on a CPU with the native library, and as without it or on a GPU."""
    if request.param == "in blocks" and native() is None:
        pytest.skip("the native library is not built, or not for this CPU")
    if request.param == "widened":
        monkeypatch.setattr(reading, "native", lambda: None)
    yield request.param


GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8, "tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"pad_token_id": 0, "num_key_value_heads": 4},
    "gemma": {"head_dim": 64, "tie_word_embeddings": True},
    "gemma2": GEMMA,
    "gemma3": GEMMA | {"num_hidden_layers": 6, "sliding_window_pattern": 6},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_gives_the_logits_of_the_model_that_it_was_written_from(family: str, way: str, tmp_path: Path) -> None:
    model = small_model(family.removeprefix("tied "), **FAMILIES[family])
    loaded = load(write_gguf(model, tmp_path / "m.gguf"), tmp_path)
    assert_same(exact_logits(loaded), transformers_logits(model))
    assert isinstance(loaded.model.lm_head, GgmlLinear) == (way == "in blocks")


@pytest.mark.parametrize("kind", [*sorted(BLOCK_TYPES), "F16", "BF16"])
def test_each_type_has_the_numbers_that_transformers_reads(kind: str, way: str, tmp_path: Path) -> None:
    path = write_gguf(small_model("llama"), tmp_path / "m.gguf", kind)
    whole = GgufConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, quantization_config=whole, dtype=torch.float32)
    assert_same(exact_logits(load(path, tmp_path)), transformers_logits(theirs))


def rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **settings}}


ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (rope(rope_type="linear", factor=4.0), {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}),
    "yarn": (
        rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=512),
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 8.0, "rope__scaling__original_context_length": 512},
    ),
    "another base": (rope(rope_type="default") | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {}),
}


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_ropes_are_those_of_the_model(kind: str, tmp_path: Path) -> None:
    settings, fields = ROPES[kind]
    model = small_model("qwen2", **settings)
    assert_same(exact_logits(load(write_gguf(model, tmp_path / "m.gguf", **fields), tmp_path)), transformers_logits(model))


def test_divisors_of_the_frequencies_are_those_of_llama_3(tmp_path: Path) -> None:
    """llama.cpp's converter writes them as a tensor, without the settings that they come from."""
    scaled = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = small_model("llama", head_dim=64, **rope(rope_type="llama3", **scaled))
    plain = 1 / 10000.0 ** (np.arange(0, 64, 2) / 64)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() == pytest.approx(8)
    path = write_gguf(model, tmp_path / "m.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", divisors))
    assert_same(exact_logits(load(path, tmp_path)), transformers_logits(model))


def test_biases_of_attention_are_read(way: str, tmp_path: Path) -> None:
    model = small_model("llama", attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            for each in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.o_proj):
                each.bias.normal_()
    assert_same(exact_logits(load(write_gguf(model, tmp_path / "m.gguf"), tmp_path)), transformers_logits(model))


def test_heads_may_be_counted_for_each_layer(way: str, tmp_path: Path) -> None:
    model = small_model("llama")

    def count(writer: GGUFWriter) -> None:
        for key, heads in (("head_count", model.config.num_attention_heads), ("head_count_kv", model.config.num_key_value_heads)):
            writer.add_array(f"llama.attention.{key}", [heads] * model.config.num_hidden_layers)

    assert_same(exact_logits(load(write_gguf(model, tmp_path / "m.gguf", change=count), tmp_path)), transformers_logits(model))


def mixed(name: str) -> str:
    """Choose types as llama.cpp's Q4_K_M does: q, k and v differ, and so do gate and up."""
    kinds = {"attn_v": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q8_0", "ffn_up": "Q5_0", "ffn_gate": "BF16", "token_embd": "Q6_K"}
    return next((kind for part, kind in kinds.items() if part in name), "Q5_K")


def test_parts_of_one_stack_may_have_different_types(way: str, tmp_path: Path) -> None:
    path = write_gguf(small_model("llama", tie_word_embeddings=True), tmp_path / "m.gguf", mixed)
    whole = GgufConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, quantization_config=whole, dtype=torch.float32)
    assert_same(exact_logits(load(path, tmp_path)), transformers_logits(theirs))


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_stay_in_blocks_and_run_natively(family: str, dtype: str, tmp_path: Path) -> None:
    path = write_gguf(small_model(family, **FAMILIES[family] | {"tie_word_embeddings": True}), tmp_path / "m.gguf", "Q4_0")
    loaded = load(path, tmp_path, dtype=dtype)
    model = loaded.model
    assert isinstance(model.get_input_embeddings(), GgmlEmbedding) and isinstance(model.lm_head, GgmlLinear)
    assert not [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Embedding)]
    assert sum(parameter.numel() for parameter in model.parameters()) < 10_000, "only norms are widened"
    assert loaded.rounds_inputs and loaded.dtype == getattr(torch, dtype)
    backend = NativeBackend(KVSpec(loaded.layers, 16, loaded.dtype, loaded.device), pages=64)
    assert isinstance(choose_forward(loaded, backend), NativeForward)


@needs_native
def test_the_dtype_is_that_of_most_weights(tmp_path: Path) -> None:
    dtypes = {kind: load(write_gguf(small_model("llama"), tmp_path / f"{kind}.gguf", kind), tmp_path, dtype="auto").dtype for kind in KINDS}
    assert dtypes == {"F32": torch.float32, "F16": torch.float32, "BF16": torch.bfloat16, "Q4_0": torch.bfloat16}


KINDS = ("F32", "F16", "BF16", "Q4_0")


def test_settings_for_other_checkpoints_are_refused(tmp_path: Path) -> None:
    path = write_gguf(small_model("llama"), tmp_path / "m.gguf", "Q8_0")
    with pytest.raises(ModelLoadError, match="quantized in the GGUF file, so --quantization int8 is refused; leave it out"):
        load(path, tmp_path, quantization="int8")


def fields(**values: Any) -> dict[str, Any]:
    return {"fields": values}


def further_tensor(name: str, shape: tuple[int, ...] = (256,)) -> dict[str, Any]:
    return {"change": lambda writer: writer.add_tensor(name, np.ones(shape, np.float32))}


def metadata(key: str, value: int) -> dict[str, Any]:
    return {"change": lambda writer: writer.add_uint32(key, value)}


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "more layers than tensors": (fields(block_count=3), "llama.block_count is 3, and it has tensors of 2 layers"),
    "a billion layers": (fields(block_count=10**9), "llama.block_count is 1000000000 and must be a whole number from 1 to"),
    "another width": (fields(embedding_length=128), "llama.embedding_length is 128 and must be 256, as token_embd.weight has"),
    "another inner width": (fields(feed_forward_length=96), "tensor blk.0.ffn_gate.weight is [512, 256], and its metadata makes [96, 256]"),
    "other heads": (fields(attention__head_count_kv=1), "tensor blk.0.attn_k.weight is [128, 256], and its metadata makes [64, 256]"),
    "values of another size": (fields(attention__value_length=32), "llama.attention.value_length is 32 and must be 64"),
    "half a rope": (fields(rope__dimension_count=32), "llama.rope.dimension_count is 32 and must be 64, the size of a head"),
    "an unknown scaling": (
        fields(rope__scaling__type="su", rope__scaling__factor=2.0),
        "llama.rope.scaling.type is 'su' and must be none, linear",
    ),
    "experts": (metadata("llama.expert_count", 8), "llama.expert_count is 8: experts are not supported from GGUF"),
    "a layer of many digits": (
        further_tensor(f"blk.{'9' * 5000}.attn_q.weight"),
        f"tensor blk.{'9' * 5000}.attn_q.weight is not supported",
    ),
    "half of a long rope": (further_tensor("rope_factors_long.weight"), "it has no tensor rope_factors_short.weight"),
    "several architectures": (
        {"change": lambda writer: writer.add_array("general.architecture", ["llama"])},
        "general.architecture ['llama'] is not supported",
    ),
    "an unknown tensor": (further_tensor("blk.0.attn_rot.weight"), "tensor blk.0.attn_rot.weight is not supported in llama"),
    "a bias that is not used": (further_tensor("blk.1.attn_q.bias"), "tensor blk.1.attn_q.bias has no place in the model"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_file_whose_parts_do_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    how, cause = UNFIT[case]
    path = write_gguf(small_model("llama"), tmp_path / "m.gguf", change=how.get("change", lambda writer: None), **how.get("fields", {}))
    with pytest.raises(ModelLoadError) as refused:
        load(path, tmp_path)
    assert f"m.gguf: {cause}" in refused.value.cause
    assert "again" in refused.value.cause or "serve the model's safetensors" in refused.value.cause


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.ones((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"general\.architecture 'mamba' is not supported from GGUF \(llama, .*safetensors"):
        load(tmp_path / "m.gguf", tmp_path)


@pytest.mark.parametrize("real", [SMOLLM2, GEMMA3], ids=lambda model: model.name)
def test_real_files_have_the_numbers_that_transformers_reads(real: PackagedModel, tmp_path: Path) -> None:
    path = real_model(real)
    loaded = load(path, tmp_path, dtype="auto")
    text = TrialText.from_folder(loaded.path, loaded.vocabulary_size)
    with widened(loaded.model), torch.inference_mode():
        got = run_whole(loaded.model, loaded.layers, text, torch.float32)
    del loaded
    theirs = AutoModelForCausalLM.from_pretrained(real_folder(real, "float32"))
    with torch.inference_mode():
        assert_same(got, torch.cat([theirs(input_ids=part[None]).logits[0] for part in text.tokens]))

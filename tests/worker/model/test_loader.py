"""The loader: its result, and the message of each rejection."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import FAMILIES, save_model
from transformers import AutoConfig, AutoModelForCausalLM

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.loader import load_model
from fairlead_worker.weights.digest import model_digest
from fairlead_worker.weights.uri import HubModel, parse_uri


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_model("llama", folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_comes_with_what_the_worker_wants_to_know(saved: Path) -> None:
    phases: list[tuple[str, int]] = []
    loaded = load_model(f"file://{saved}", progress=lambda phase, percent, *_: phases.append((phase, percent)))
    assert (loaded.max_model_len, loaded.eos_token_ids, loaded.dtype, loaded.path) == (4096, (1,), torch.float32, saved)
    assert [(layer.heads, layer.kv_heads, layer.key_dim, layer.window) for layer in loaded.layers] == [(4, 2, 16, None)] * 2
    assert not loaded.model.training
    assert phases[0] == ("config", 0)
    assert phases[-1] == ("fuse", 100)
    assert [p for p in phases if p[0] == "weights"] == sorted(p for p in phases if p[0] == "weights")


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_and_caps_are_learnt_from_the_model(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    layers = load_model(str(tmp_path)).layers
    windows = {"mistral": [100, 100], "gemma2": [48, None, 48, None], "gemma3": [48, 48, None, 48]}
    assert [layer.window for layer in layers] == windows.get(family, [None, None])
    assert {layer.softcap for layer in layers} == ({5.0} if family == "gemma2" else {None})


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_a_gemma_that_attends_to_later_tokens_is_refused(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path, use_bidirectional_attention=True)
    with pytest.raises(ModelLoadError, match="attention that is not causal"):
        load_model(str(tmp_path))


def test_eos_ids_come_from_the_generation_config_first(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[5, 6])
    assert load_model(str(folder)).eos_token_ids == (5, 6)
    (folder / "generation_config.json").unlink()
    assert load_model(str(folder)).eos_token_ids == (1,)


def test_a_shorter_length_may_be_asked_and_a_longer_one_not(saved: Path) -> None:
    assert load_model(str(saved), max_model_len=100).max_model_len == 100
    with pytest.raises(ModelLoadError, match="--max-model-len 5000 is more than the model's 4096"):
        load_model(str(saved), max_model_len=5000)


def test_a_config_without_room_for_a_token_is_refused(folder: Path) -> None:
    edit(folder / "config.json", max_position_embeddings=0)
    with pytest.raises(ModelLoadError, match=r"max_position_embeddings \(or n_positions\) 0: the context length is unknown"):
        load_model(str(folder))


def test_rope_that_looks_at_the_batch_is_kept_to_its_original_length(folder: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 1024}
    edit(folder / "config.json", rope_parameters=rope)
    assert load_model(str(folder)).max_model_len == 1024


def test_dtypes(saved: Path) -> None:
    assert load_model(str(saved), dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ModelLoadError, match="unknown dtype 'int3'; set --dtype to one of: auto, float32, bfloat16, float16"):
        load_model(str(saved), dtype="int3")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("falcon_h1", {"embedding_multiplier": 5.656854249492381}),
        ("granite", {"embedding_multiplier": 5.656854249492381}),
        ("gemma", {"hidden_size": 96}),
        ("minicpm3", {"scale_emb": 5.656854249492381}),
    ],
)
def test_the_factor_of_embeddings_is_rounded_where_transformers_rounds_it(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Gemma and MiniCPM 3 keep it in the weights' dtype. The others multiply by a number of Python."""
    theirs = save_model(family, tmp_path, **settings).bfloat16()
    tokens = torch.arange(64)
    with torch.inference_mode():
        expected = theirs(tokens[None], output_hidden_states=True).hidden_states[0][0]
        assert torch.equal(load_model(str(tmp_path), dtype="bfloat16").model.model.embed(tokens, tokens), expected)


def test_auto_computes_half_precision_in_float32_on_a_cpu(folder: Path) -> None:
    edit(folder / "config.json", dtype="float16")
    assert load_model(str(folder)).dtype == torch.float32


def lose_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def lose_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lose_shard(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def lose_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut_weights(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)


def change_shape(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=256)


def unknown_type(folder: Path) -> None:
    edit(folder / "config.json", model_type="telepathy")


def encoder_type(folder: Path) -> None:
    edit(folder / "config.json", model_type="deberta-v2", architectures=["DebertaV2Model"])


def spoil_numbers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def quantize(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "awq"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_config, r"no config.json in .*/model; it is not a transformers model"),
        (break_config, r"config.json cannot be read"),
        (lose_weights, r"missing weights: no model.safetensors in .*; pytorch_model.bin is pickled, .* convert it to safetensors"),
        (lose_shard, r"missing weights: model-00002-of-00002.safetensors not in"),
        (lose_tensor, r"missing weights: 1 tensors, first model.layers.1.mlp.up_proj.weight"),
        (cut_weights, r"weights cannot be loaded"),
        (spoil_numbers, r"its weights give numbers that are not finite on a short text: fetch or convert it again"),
        (change_shape, r"weights cannot be loaded"),
        (unknown_type, r"unsupported architecture: transformers has no causal LM for model_type 'telepathy'"),
        (
            encoder_type,
            r"unsupported architecture: DebertaV2Model has an encoder \(model_type 'deberta-v2'\), and the encoders served are bert, ",
        ),
        (quantize, r"its config.json says awq, and no file has a tensor that ends with .qweight"),
    ],
)
def test_a_spoilt_folder_is_refused_by_name(folder: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(folder)
    uri = f"file://{folder}"
    with pytest.raises(ModelLoadError, match=message) as refused:
        load_model(uri)
    assert str(refused.value).startswith(f"cannot load model {uri}: ")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("/no/such/folder", "there is no /no/such/folder; correct the path, or mount its volume"),
        ("relative/path", "not an absolute path"),
        ("file://host/path", "file URIs name no host"),
        ("ftp://bucket/key", "unknown scheme 'ftp'"),
        ("hf://", "not a hub repository"),
        ("hf://a/b/c", "not a hub repository"),
        ("/etc/passwd", "is a file, not a folder"),
    ],
)
def test_a_bad_uri_is_refused_by_name(uri: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as refused:
        load_model(uri)
    assert uri in str(refused.value)


def test_uris() -> None:
    assert parse_uri("file:///a%20b/c") == Path("/a b/c")
    assert parse_uri("/a b/c") == Path("/a b/c")
    assert parse_uri("hf://org/name@v1") == HubModel("org/name", "v1")
    assert parse_uri("hf://org/name") == HubModel("org/name", None)


TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_head": 2}, "does not use transformers' attention interface|position"),
    "rwkv": ({"attention_hidden_size": 16}, "does not use transformers' attention interface|max_position_embeddings"),
    "minimax": (
        {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]},
        "1 of 2 layers use attention; recurrent layers without a definition of our own are not served",
    ),
    "qwen3_next": (
        {"hidden_act": "gelu", "num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["linear_attention", "full_attention"]},
        "does not use transformers' attention interface",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_attention_that_we_do_not_do_is_refused_at_load(kind: str, tmp_path: Path) -> None:
    settings, message = REFUSED[kind]
    config = AutoConfig.for_model(kind, **(TINY | settings))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        load_model(str(tmp_path))


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering", "ProcessRewardModel"])
def test_a_decoder_with_another_head_is_refused(head: str, folder: Path) -> None:
    edit(folder / "config.json", architectures=[f"LlamaFor{head}"])
    with pytest.raises(ModelLoadError, match=f"LlamaFor{head}: only encoders' heads are served"):
        load_model(str(folder))


def test_the_digest_names_the_files_and_not_their_place(folder: Path, saved: Path) -> None:
    first = model_digest(saved)
    assert model_digest(folder) == first
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 1
    tensors["lm_head.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert (folder / "model.safetensors").stat().st_size == (saved / "model.safetensors").stat().st_size
    second = model_digest(folder)
    edit(folder / "config.json", rms_norm_eps=0.1)
    assert len({first, second, model_digest(folder)}) == 3


def test_a_quantization_config_of_null_is_none(folder: Path) -> None:
    edit(folder / "config.json", quantization_config=None)
    load_model(str(folder))
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text, "quantization_config": None}))
    load_model(str(folder))


@pytest.mark.parametrize("place", ["the model", "its text part", "no mapping"])
def test_an_unknown_quantization_is_refused_wherever_it_is_written(place: str, folder: Path) -> None:
    given: Any = "hqq" if place == "no mapping" else {"quant_method": "hqq"}
    edit(folder / "config.json", quantization_config=given)
    if place == "its text part":
        text = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    with pytest.raises(ModelLoadError, match=r"quantized \((hqq|unknown)\), which is not supported"):
        load_model(str(folder))

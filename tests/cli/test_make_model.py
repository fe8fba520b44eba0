"""A generated model loads in transformers and produces varied text in every family; invalid sizes are refused with the flag named."""

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fairlead.errors import UserError
from fairlead.main import main
from fairlead.random_model import ARCHITECTURES, Recipe, make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_family_loads_and_generates_varied_text(models: Path, arch: str) -> None:
    path = make_model(models / arch, arch=arch)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is a rope?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=48, min_new_tokens=48, do_sample=False)
    new = out[0, ids["input_ids"].shape[1] :].tolist()
    assert len(set(new)) >= 16, f"{arch} repeats itself: {new}"
    assert not model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == [2, 0]


def test_tokenizer_round_trips_text_and_renders_chatml(models: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model(models / "round", vocab=1024))
    for text in ("Plain text.", "tabs\tand\n\nlines", "café ☕ 東京 🚀", "<|im_start|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer) == 1024
    assert tokenizer.encode("<|im_end|>") == [2]


def test_a_large_vocabulary_is_padded_and_round_trips(models: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model(models / "large", vocab=12_000, hidden=32))
    assert len(tokenizer) == 12_000
    assert tokenizer.encode(tokenizer.decode([11_999, 500, 11_000])) == [11_999, 500, 11_000]


def test_one_seed_gives_the_same_bytes_and_another_seed_other_weights(models: Path) -> None:
    one, two, other = (make_model(models / name, seed=seed) for name, seed in (("one", 7), ("two", 7), ("other", 8)))
    assert digests(one) == digests(two)
    assert digests(one)["model.safetensors"] != digests(other)["model.safetensors"]


def test_a_finished_model_is_kept_and_other_files_are_not_overwritten(models: Path) -> None:
    path = make_model(models / "kept")
    before = (path / "model.safetensors").stat().st_mtime_ns
    make_model(path)
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"already \(layers 2, not 1\): give --force to replace it, or another directory"):
        make_model(path, layers=1)
    make_model(path, layers=1, force=True)
    (path / "model.safetensors").write_bytes(b"damaged")
    make_model(path, layers=1, force=True)
    assert (path / "model.safetensors").stat().st_size > 1000
    theirs = models / "theirs"
    theirs.mkdir()
    (theirs / "thesis.doc").write_text("years")
    with pytest.raises(UserError, match="contains files of something else: give another directory"):
        make_model(theirs, force=True)
    assert (theirs / "thesis.doc").read_text() == "years"
    assert not [entry for entry in models.iterdir() if entry.name.startswith(".")]


def test_weights_are_written_in_the_requested_dtype(models: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_model(models / "half", dtype="bfloat16"))
    assert model.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"arch": "opt"}, "--arch opt"),
        ({"hidden": 65}, "--heads 4 does not divide --hidden 65: choose --hidden 68"),
        ({"heads": 4, "kv_heads": 3}, "--kv-heads 3 does not divide --heads 4"),
        ({"vocab": 100}, "--vocab 100"),
        ({"layers": 0}, "--layers 0"),
        ({"hidden": 12}, "--head-dim 3"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"arch": "gpt2", "kv_heads": 2}, "--kv-heads 2"),
        ({"arch": "llama", "sliding_window": 8}, "--sliding-window 8"),
        ({"hidden": 65536, "layers": 100}, "billion parameters"),
    ],
)
def test_an_impossible_model_is_refused_with_the_flag_named(options: dict[str, object], flag: str) -> None:
    with pytest.raises(UserError) as refused:
        Recipe.of(**options)  # type: ignore[arg-type]  # one value is wrong on purpose
    assert flag in str(refused.value)


def test_a_wrong_flag_gives_one_line_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["make-model", str(tmp_path / "m"), "--hidden", "65"])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("fairlead make-model: --heads 4 does not divide --hidden 65")
    with pytest.raises(SystemExit) as left:
        main(["make-model", str(tmp_path / "m"), "--layers", "1"])
    assert left.value.code == 0
    assert (tmp_path / "m" / "tokenizer.json").exists()
    assert f"serve it: fairlead serve {tmp_path / 'm'}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["make-model", str(tmp_path / "m"), "--layers", "1"])
    assert "exists already, unchanged" in capsys.readouterr().out


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


def test_every_file_gets_the_folders_read_permissions(tmp_path: Path) -> None:
    made = make_model(tmp_path / "model", arch="qwen3")
    modes = {path.name: path.stat().st_mode & 0o777 for path in made.iterdir()}
    assert set(modes.values()) == {modes["config.json"]}


def test_a_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/below/model cannot be created \(.+\): give a writable directory"):
        make_model(tmp_path / "file" / "below" / "model")

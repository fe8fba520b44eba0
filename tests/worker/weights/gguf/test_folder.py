"""A GGUF file is described by ordinary files, written once; wherever it comes from, its URI leads there."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tests.gguf_models import small_model, write_gguf

from fairlead_worker.config.values import to_model_uri
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.formats.gguf import find_gguf
from fairlead_worker.weights.bucket import BucketModel
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.digest import model_digest
from fairlead_worker.weights.gguf import folder as describing
from fairlead_worker.weights.hub import HubModel
from fairlead_worker.weights.oci.reference import OciModel
from fairlead_worker.weights.uri import parse_uri, resolve

FILES = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(small_model("llama"), tmp_path_factory.mktemp("gguf") / "tiny.gguf", "Q4_0")


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


def test_a_file_becomes_a_folder_that_is_written_once(model: Path, cache: ModelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve(model.as_uri(), cache=cache)
    assert {path.name for path in folder.iterdir()} == FILES | {"tiny.gguf"}
    assert (folder / "tiny.gguf").resolve() == model.resolve() and folder.is_relative_to(cache.root)
    monkeypatch.setattr(describing, "read_gguf", lambda path: pytest.fail("it is described already"))
    assert resolve(model.as_uri(), cache=cache) == folder
    assert [path for path in folder.parent.iterdir() if path != folder] == [], "nothing is left over"


def test_another_file_under_the_same_name_gets_another_folder(model: Path, cache: ModelCache, tmp_path: Path) -> None:
    copy = tmp_path / "m.gguf"
    copy.write_bytes(model.read_bytes())
    first = resolve(copy.as_uri(), cache=cache)
    write_gguf(small_model("llama", num_hidden_layers=3), copy, "Q4_0")
    second = resolve(copy.as_uri(), cache=cache)
    assert first != second and model_digest(first) != model_digest(second)
    assert json.loads((second / "config.json").read_text())["num_hidden_layers"] == 3


def test_the_name_by_which_a_file_was_found_may_go(model: Path, cache: ModelCache, tmp_path: Path) -> None:
    """A demo links to the model in the user's cache. `fairlead serve` of the same file reads the same folder."""
    name = tmp_path / model.name
    name.symlink_to(model)
    folder = resolve(name.as_uri(), cache=cache)
    name.unlink()
    assert resolve(model.as_uri(), cache=cache) == folder and find_gguf(folder)


def test_a_folder_whose_link_leads_nowhere_is_written_again(model: Path, cache: ModelCache, tmp_path: Path) -> None:
    folder = resolve(model.as_uri(), cache=cache)
    (folder / model.name).unlink()
    (folder / model.name).symlink_to(tmp_path / "gone")
    assert resolve(model.as_uri(), cache=cache) == folder and (folder / model.name).samefile(model)


def test_the_digest_is_that_of_the_weights(model: Path, cache: ModelCache, tmp_path: Path) -> None:
    """Workers share KV by it, so that pods with the same file in other places have the same."""
    copy = tmp_path / model.name
    content = bytearray(model.read_bytes())
    copy.write_bytes(content)
    same = model_digest(resolve(copy.as_uri(), cache=cache))
    assert same == model_digest(resolve(model.as_uri(), cache=cache))
    content[-1] ^= 1
    copy.write_bytes(content)
    assert model_digest(resolve(copy.as_uri(), cache=cache)) != same


def test_without_a_cache_to_write_to_the_folder_is_the_users_own(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describing.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "cache").write_text("a file is in the way")
    folder = resolve(model.as_uri(), cache=ModelCache(tmp_path / "cache"))
    assert folder.parent == tmp_path / f"fairlead-gguf-{os.getuid()}" and folder.parent.stat().st_mode & 0o777 == 0o700


def with_metadata(path: Path, **texts: Any) -> Path:
    def change(writer: GGUFWriter) -> None:
        for key, value in texts.items():
            (writer.add_string if isinstance(value, str) else writer.add_float32)(key.replace("__", "."), value)

    return write_gguf(small_model("llama"), path, "Q8_0", change=change)


def test_templates_and_sampling_defaults_of_the_file_are_used(cache: ModelCache, tmp_path: Path) -> None:
    one = with_metadata(tmp_path / "one.gguf", tokenizer__chat_template="{{ messages }}", general__sampling__temp=0.5)
    folder = resolve(one.as_uri(), cache=cache)
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.5
    two = with_metadata(tmp_path / "two.gguf", tokenizer__chat_template="plain", tokenizer__chat_template__tool_use="tools")
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(resolve(two.as_uri(), cache=cache)).chat_template == {"default": "plain", "tool_use": "tools"}


def test_a_folder_with_one_gguf_model_needs_no_name(model: Path, cache: ModelCache, tmp_path: Path) -> None:
    folder = tmp_path / "volume" / "models"
    folder.mkdir(parents=True)
    (folder / "a.gguf").write_bytes(model.read_bytes())
    for place in (folder, folder.parent):  # an image of KServe has it in /models
        assert (resolve(place.as_uri(), cache=cache) / "a.gguf").resolve() == folder / "a.gguf"
    (folder / "b.gguf").write_bytes(model.read_bytes())
    with pytest.raises(ModelLoadError, match=r"there are 2 GGUF models in .*, such as a\.gguf, b\.gguf: name one"):
        resolve(folder.as_uri(), cache=cache)
    assert resolve((folder / "b.gguf").as_uri(), cache=cache).name.startswith("b-")
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="there are 2 GGUF models"):
        resolve(folder.as_uri(), cache=cache)
    (folder / "model.safetensors").touch()
    assert resolve(folder.as_uri(), cache=cache) == folder and find_gguf(folder) is None, "safetensors come first"
    named = resolve((folder / "b.gguf").as_uri(), cache=cache)
    assert find_gguf(named) == named / "b.gguf", "a name comes before safetensors"


def test_a_described_folder_is_a_model_itself(model: Path, cache: ModelCache) -> None:
    folder = resolve(model.as_uri(), cache=cache)
    assert resolve(folder.as_uri(), cache=cache) == folder and find_gguf(folder) == folder / model.name


def test_uris_name_a_file() -> None:
    assert parse_uri("hf://org/name/file.Q4_K_M.gguf@v1") == HubModel("org/name", "v1", "file.Q4_K_M.gguf")
    assert parse_uri("hf://org/name/quants/file.gguf") == HubModel("org/name", None, "quants/file.gguf")
    assert parse_uri("s3://bucket/a/b/file.gguf") == BucketModel("bucket", "a/b", "s3", "file.gguf")
    assert parse_uri("gs://bucket/file.gguf") == BucketModel("bucket", "", "gs", "file.gguf")
    found = parse_uri("oci://ghcr.io/org/name:1#models/file.gguf")
    assert found == OciModel("ghcr.io", "org/name", "1", "models", "file.gguf")
    assert isinstance(found, OciModel) and found.at("sha256:0") == "oci://ghcr.io/org/name@sha256:0#models/file.gguf"
    assert parse_uri("file:///models/file.gguf") == Path("/models/file.gguf")
    for wrong in ("hf://org/name/file.safetensors", "hf://org/file.gguf", "hf://org/file.gguf@v1", "hf://file.gguf"):
        with pytest.raises(ModelLoadError, match=r"not a hub repository; write .*hf://org/name/FILE\.gguf"):
            parse_uri(wrong)


def test_a_user_names_a_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    for name in (model.name, f"./{model.name}", str(model)):
        assert to_model_uri(name) == model.as_uri()
    assert to_model_uri("org/name/file.gguf@main") == "hf://org/name/file.gguf@main"
    assert to_model_uri("./missing.gguf") == (model.parent / "missing.gguf").as_uri()


def test_a_missing_file_is_named(tmp_path: Path, cache: ModelCache) -> None:
    with pytest.raises(ModelLoadError, match=r"there is no /.*/m\.gguf; correct the path, or mount its volume"):
        resolve((tmp_path / "m.gguf").as_uri(), cache=cache)

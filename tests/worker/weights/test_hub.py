"""hf:// URIs through the real hub client, in a process of its own: the client reads HF_ENDPOINT when it is imported."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gguf_models import small_model, write_gguf
from tests.worker.weights.hub import COMMIT, TOKEN, Hub

WORKER = Path(__file__).parents[3] / "worker"
SCRIPT = """
import json, sys
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.uri import resolve
for uri in sys.argv[1:]:
    phases = []
    try:
        folder = resolve(uri, lambda phase, percent, *more: phases.append((phase, percent)))
        print(json.dumps({"folder": str(folder), "phases": phases, "torch": "torch" in sys.modules}))
    except ModelLoadError as error:
        print(json.dumps({"error": str(error)}))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    files = tmp_path / "files"
    files.mkdir()
    (files / "config.json").write_text('{"model_type": "llama"}')
    (files / "model.safetensors").write_bytes(bytes(300_000))
    (files / "pytorch_model.bin").write_bytes(b"pickled")
    (files / "picture.png").write_bytes(b"png")
    with Hub(files) as server:
        yield server


READ_ONLY = """
import os
os.access = lambda path, mode, **how: False
"""
"""Simulates a read-only mount: root, which runs some of these tests, ignores permissions."""


def ask(uri: str, cache: Path, endpoint: str, before: str = "", **environment: str) -> dict[str, object]:
    (answer,) = ask_for([uri], cache, endpoint, before, **environment)
    return answer


def ask_for(uris: list[str], cache: Path, endpoint: str, before: str = "", **environment: str) -> list[dict[str, object]]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", before + SCRIPT, *uris],
        env={**keep, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "PYTHONPATH": str(WORKER), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(uris) :]]


def test_a_repository_is_fetched_once_without_what_we_do_not_need(hub: Hub, tmp_path: Path) -> None:
    answer = ask("hf://tiny/model", tmp_path / "cache", hub.url)
    folder = Path(str(answer["folder"]))
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert folder.name == COMMIT
    assert ["download", 100] in answer["phases"]  # type: ignore[operator]  # JSON of a list
    assert answer["torch"] is False
    fetched = sorted(hub.fetched)
    again = ask("hf://tiny/model@v1", tmp_path / "cache", hub.url)
    assert again["folder"] == answer["folder"]
    assert sorted(hub.fetched) == fetched
    with (folder / "model.safetensors").open("r+b") as file:  # a volume that has lost a write: names and sizes are as they were
        file.write(b"lost")
    ask("hf://tiny/model", tmp_path / "cache", hub.url)
    assert (folder / "model.safetensors").read_bytes() == bytes(300_000)


REFUSALS = {
    "hf://no/such": "no such repository, or it is private and HF_TOKEN (spec.model.secretRef) does not open it (404)",
    "hf://private/model": "no such repository, or it is private and HF_TOKEN (spec.model.secretRef) does not open it (401)",
    "hf://gated/model": (
        "the repository is gated (403): accept its terms on the hub, and give a token of that account: HF_TOKEN (spec.model.secretRef)"
    ),
    "hf://tiny/model@v9": "the repository has no revision 'v9' (404)",
    "hf://limited/model": "the hub answered 429: try again later, or mirror the model and use file:///",
    "hf://broken/model": "the hub cannot be reached (RemoteProtocolError: Server disconnected without sending a response.)",
}


def test_refusals_say_what_to_do(hub: Hub, tmp_path: Path) -> None:
    answers = ask_for([*REFUSALS], tmp_path / "cache", hub.url)
    assert answers == [{"error": f"cannot load model {uri}: {message}"} for uri, message in REFUSALS.items()]


def test_a_cache_that_cannot_be_written_serves_what_it_holds(hub: Hub, tmp_path: Path) -> None:
    apart = {"HF_HUB_CACHE": str(tmp_path / "elsewhere")}
    answer = ask("hf://tiny/model", tmp_path / "cache", hub.url, **apart)
    assert str(answer["folder"]).startswith(apart["HF_HUB_CACHE"])
    fetched = len(hub.fetched)
    again = ask("hf://tiny/model", tmp_path / "cache", hub.url, READ_ONLY, **apart)
    assert again["folder"] == answer["folder"] and len(hub.fetched) == fetched
    refused = ask("hf://tiny/model@v1", tmp_path / "cache", hub.url, READ_ONLY)
    assert "which cannot be written: make spec.model.cache (FAIRLEAD_MODEL_CACHE) writable, or fill it" in str(refused["error"])


def test_a_token_opens_a_private_repository(hub: Hub, tmp_path: Path) -> None:
    assert "folder" in ask("hf://private/model", tmp_path / "cache", hub.url, HF_TOKEN=TOKEN)


def test_an_unreachable_hub_is_named(tmp_path: Path) -> None:
    error = str(ask("hf://tiny/model", tmp_path / "cache", "http://127.0.0.1:9")["error"])
    assert error.startswith("cannot load model hf://tiny/model: the hub cannot be reached and the files are not cached here")


def test_one_gguf_file_of_many_is_fetched(hub: Hub, tmp_path: Path) -> None:
    """Without torch, as `fairlead-prefetch` runs."""
    write_gguf(small_model("llama"), hub.folder / "tiny.Q8_0.gguf", "Q8_0")
    (hub.folder / "tiny.F16.gguf").write_bytes(b"another one")
    answer = ask("hf://tiny/model/tiny.Q8_0.gguf@v1", tmp_path / "cache", hub.url)
    folder = Path(str(answer["folder"]))
    assert sorted(path.name for path in folder.glob("*.gguf")) == ["tiny.Q8_0.gguf"] and (folder / "tokenizer.json").is_file()
    assert {name for name in hub.fetched if name.endswith((".gguf", ".safetensors"))} == {"tiny.Q8_0.gguf"}
    assert not answer["torch"]
    missing = ask("hf://tiny/model/none.gguf", tmp_path / "cache", hub.url)
    assert "there is no /" in str(missing["error"]) and "none.gguf" in str(missing["error"])

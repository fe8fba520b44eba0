"""Remote models by their headers: shapes are those of the files, and no weights are fetched."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.gguf_models import small_model, write_gguf
from tests.models import save_model
from tests.servers import s3_server
from tests.worker.weights.hub import Hub

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.headers import resolve_headers

WORKER = Path(__file__).parents[3] / "worker"
SCRIPT = """
import json, sys
from pathlib import Path
from safetensors import safe_open
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.headers import resolve_headers
try:
    folder = resolve_headers(sys.argv[1], Path(sys.argv[2]))
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {key: file.get_slice(key).get_shape() for key in file.keys()}
    print(json.dumps({"shapes": shapes, "config": json.loads((folder / "config.json").read_text())["model_type"]}))
except ModelLoadError as error:
    print(json.dumps({"error": error.cause}))
"""


def ask(uri: str, scratch: Path, endpoint: str) -> dict[str, object]:
    """Resolve in a process of its own: the hub's client reads HF_ENDPOINT when it is imported."""
    scratch.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, uri, str(scratch)],
        env={**environment, "HF_ENDPOINT": endpoint, "HF_HOME": str(scratch / "home"), "PYTHONPATH": str(WORKER)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def shapes_of(folder: Path) -> dict[str, list[int]]:
    shapes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            shapes |= {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118  # not a mapping
    return shapes


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "several files"])
def test_a_model_of_the_hub(shards: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = save_model("llama", folder, hidden_size=256, vocab_size=4096)
    if shards:
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="2MB")
        assert len(list(folder.glob("*.safetensors"))) > 1
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with Hub(folder) as hub:
        found = ask("hf://tiny/model", tmp_path / "scratch", hub.url)
        assert found == {"shapes": shapes_of(folder), "config": "llama"}
        assert hub.sent < 40_000 < weights / 50
        assert "no such repository" in str(ask("hf://none/model", tmp_path / "scratch", hub.url)["error"])
        (folder / "config.json").unlink()
        assert "it has no config.json" in str(ask("hf://tiny/model", tmp_path / "other", hub.url)["error"])


def test_a_gguf_file_of_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_gguf(small_model("llama"), folder / "tiny.gguf", "Q4_0")
    with Hub(folder) as hub:
        assert ask("hf://tiny/model/tiny.gguf", tmp_path / "scratch", hub.url)["config"] == "llama"


def test_files_that_are_no_weights_and_images_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model("llama", folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)
    with Hub(folder) as hub:
        assert ask("hf://tiny/model", tmp_path / "scratch", hub.url)["error"] == "model.safetensors is not a safetensors file"
    with pytest.raises(ModelLoadError, match="an image cannot be read in part: pull it"):
        resolve_headers("oci://registry.example/model:1", tmp_path)


@pytest.fixture(scope="module")
def s3() -> Iterator[s3_server.S3Server]:
    if problem := s3_server.install():
        pytest.skip(f"no S3 server: {problem}")
    with s3_server.S3Server() as server:
        server.make("models")
        yield server


def test_a_model_of_a_bucket(s3: s3_server.S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1", "ENDPOINT_URL": s3.url}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    folder = tmp_path / "model"
    save_model("llama", folder)
    for path in folder.iterdir():
        s3.put("models", f"tiny/{path.name}", path.read_bytes())
    found = resolve_headers("s3://models/tiny", tmp_path / "scratch")
    assert shapes_of(found) == shapes_of(folder)
    sparse = (found / "model.safetensors").stat()
    assert sparse.st_size == (folder / "model.safetensors").stat().st_size and sparse.st_blocks * 512 < sparse.st_size / 10
    with pytest.raises(ModelLoadError, match="there is no model file in that folder"):
        resolve_headers("s3://models/none", tmp_path / "scratch")

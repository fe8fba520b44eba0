"""s3:// URIs from a real S3 server: one download per cache, resumed after a kill, verified, and rejected with the fix named."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.gguf_models import small_model, write_gguf
from tests.servers import s3_server
from tests.worker.weights.throttle import Throttle

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights import bucket
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.uri import resolve

WORKER = Path(__file__).parents[3] / "worker"
MIB = 1 << 20
WEIGHTS = os.urandom(5 * MIB + 17)
URI = "s3://models/tiny"
DOWNLOADER = """
import sys
from pathlib import Path
from fairlead_worker.weights import bucket
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.uri import resolve
bucket.RANGE_BYTES = 1 << 20
report = lambda *progress: print(" ".join(map(str, progress)) + "\\n", end="", flush=True)
resolve(sys.argv[1], report, ModelCache(Path(sys.argv[2]), "pod-a"))
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[s3_server.S3Server]:
    problem = s3_server.install()
    if problem:
        pytest.skip(f"no S3 server: {problem}")
    with s3_server.S3Server() as server:
        server.make("models")
        server.put("models", "tiny/config.json", b'{"model_type": "llama"}')
        server.put("models", "tiny/model.safetensors", WEIGHTS)
        server.put("models", "tiny/picture.png", b"png")
        server.put("models", "tiny/original/old.safetensors", b"not of this model")
        yield server


@pytest.fixture
def source(s3: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Throttle]:
    with Throttle(s3.url) as throttle:
        credentials = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": throttle.url}
        for name, value in credentials.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(bucket, "RANGE_BYTES", MIB)
        yield throttle


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_model_is_downloaded_once_and_changes_are_fetched(source: Throttle, s3: s3_server.S3Server, tmp_path: Path) -> None:
    source.open()
    seen: list[tuple[Any, ...]] = []
    cache = ModelCache(tmp_path, "pod-a")
    folder = resolve(URI, lambda *progress: seen.append(progress), cache)
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS and cache.is_complete(URI, folder)
    assert seen[-1][:2] == ("download", 100) and seen[-1][3] == len(WEIGHTS) + 23 and len(source.passed) == 5  # and a range of 17 bytes
    assert resolve(URI, cache=cache) == folder and len(source.passed) == 5
    s3.put("models", "tiny/config.json", b'{"model_type": "qwen3"}')
    assert "qwen3" in (resolve(URI, cache=cache) / "config.json").read_text() and len(source.passed) == 5
    with (folder / "model.safetensors").open("r+b") as file:  # a volume that has lost a write
        file.write(bytes(4096))
    assert cache.is_damaged(URI, folder)
    assert (resolve(URI, cache=cache) / "model.safetensors").read_bytes() == WEIGHTS and cache.is_complete(URI, folder)


def test_an_object_that_is_replaced_meanwhile_is_no_model_of_two_halves(
    source: Throttle, s3: s3_server.S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "RANGES_AT_ONCE", 2)
    other, key = os.urandom(len(WEIGHTS)), "tiny/model.safetensors"
    try:
        with ThreadPoolExecutor(1) as thread:
            source.allow(1)
            loading = thread.submit(resolve, URI, cache=ModelCache(tmp_path))
            until(lambda: source.passed, "a range of the old one")
            s3.put("models", key, other)
            source.open()
            with pytest.raises(ModelLoadError, match="was replaced during its download"):
                loading.result(60)
        assert (resolve(URI, cache=ModelCache(tmp_path)) / "model.safetensors").read_bytes() == other
    finally:
        s3.put("models", key, WEIGHTS)


def test_a_killed_download_is_resumed_and_waiting_workers_name_the_holder(source: Throttle, tmp_path: Path) -> None:
    start = [sys.executable, "-c", DOWNLOADER, URI, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{WORKER}:{WORKER.parent / 'index'}"}
    source.allow(2)
    with subprocess.Popen(start, env=environment, stdout=subprocess.DEVNULL) as first:
        # The record of this file stays until all its ranges are there. That of config.json may vanish while it is read.
        marks = ".model.safetensors.*.ranges"
        until(lambda: sum(path.read_bytes().count(1) for path in tmp_path.rglob(marks)) >= 2, "two ranges on the volume")
        with subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            # A note that is read while the holder rewrites it has no name.
            assert any(line.startswith("wait") and "for pod-a, which downloads it" in line for line in second.stdout)
            first.kill()
            first.wait()
            source.open()
            assert "download 100" in second.stdout.read()
            assert second.wait(60) == 0
    big = [each for path, each in source.passed if path.endswith("model.safetensors")]
    assert len(set(big)) == 5, "every range"
    assert len(big) <= 5 + 6, "at most those on their way were asked for twice"
    assert (ModelCache(tmp_path).folder(URI) / "model.safetensors").read_bytes() == WEIGHTS
    assert not list(tmp_path.rglob("*.part"))


def test_a_store_that_is_away_is_not_asked_for_what_is_complete(source: Throttle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.open()
    folder = resolve(URI, cache=ModelCache(tmp_path))
    monkeypatch.setattr(bucket, "RETRY_SECONDS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert resolve(URI, cache=ModelCache(tmp_path)) == folder
    with pytest.raises(ModelLoadError, match=r"cannot be reached: see spec\.model\.endpoint"):
        resolve(URI, cache=ModelCache(tmp_path / "other"))


@pytest.mark.parametrize(
    ("uri", "status", "message"),
    [
        (URI, 403, "refuses access (403): the key of spec.model.secretRef"),
        (URI, 401, "asks for credentials (401): give spec.model.secretRef"),
        ("s3://nobucket/tiny", 0, "there is no such bucket (404): see spec.model.uri"),
        ("s3://models/tinny", 0, "there is no model file in that folder of the bucket: see spec.model.uri"),
    ],
)
def test_refusals_name_the_field(source: Throttle, tmp_path: Path, uri: str, status: int, message: str) -> None:
    source.fail = (status, b"<Error><Code>AccessDenied</Code></Error>") if status else None
    with pytest.raises(ModelLoadError) as refused:
        resolve(uri, cache=ModelCache(tmp_path))
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("refuses", [False, True], ids=["away", "refuses"])
def test_a_pod_without_credentials_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
    """The last place that the client looks for them is the node's metadata service. A 403 of that one says nothing about the bucket."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(bucket, "RETRY_SECONDS", 1)
    with refusing() as url:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", url if refuses else "http://127.0.0.1:9")
        with pytest.raises(ModelLoadError, match=r"there are no credentials: give spec\.model\.secretRef"):
            resolve(URI, cache=ModelCache(tmp_path))


@contextmanager
def refusing() -> Iterator[str]:
    """A metadata service that gives no tokens."""

    class Refuse(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def test_a_full_volume_is_named_before_the_download(source: Throttle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": MIB})
    monkeypatch.setattr("fairlead_worker.weights.cache.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ModelLoadError, match=r"enlarge the volume of spec\.model\.cache"):
        resolve(URI, cache=ModelCache(tmp_path))
    assert not source.passed


def test_a_cache_that_cannot_be_written_is_named(source: Throttle, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps("no folder"))
    with pytest.raises(ModelLoadError, match=r"the cache .* failed"):
        resolve(URI, cache=ModelCache(tmp_path / "file"))


def test_one_gguf_file_of_many_is_downloaded(s3: s3_server.S3Server, source: Throttle, tmp_path: Path) -> None:
    source.open()
    path = write_gguf(small_model("llama"), tmp_path / "tiny.Q8_0.gguf", "Q8_0")
    s3.put("models", "quants/tiny.Q8_0.gguf", path.read_bytes())
    s3.put("models", "quants/tiny.F16.gguf", b"another one")
    cache = ModelCache(tmp_path / "cache")
    folder = resolve("s3://models/quants/tiny.Q8_0.gguf", cache=cache)
    assert (folder / "tiny.Q8_0.gguf").read_bytes() == path.read_bytes() and (folder / "tokenizer.json").is_file()
    assert [file.name for file in (cache.root / "fairlead" / "models").rglob("*.gguf")] == ["tiny.Q8_0.gguf"]

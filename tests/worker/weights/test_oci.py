"""oci:// URIs from a real registry: images and artifacts, every digest compared, nothing written outside, resumed after a kill."""

import base64
import errno
import hashlib
import http.client
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from release.registry import installed_registry, run_registry
from tests.gguf_models import small_model, write_gguf
from tests.worker.weights.images import EMPTY, RAW, TAR, TITLE, push, push_manifest, tar

from fairlead_worker.config.values import to_model_uri
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.oci import registry as client
from fairlead_worker.weights.oci.credentials import read_credentials
from fairlead_worker.weights.oci.manifest import Layer, platform_digest
from fairlead_worker.weights.oci.reference import OciModel, is_plain, parse_oci
from fairlead_worker.weights.uri import resolve

CONFIG = b'{"model_type": "llama"}'
WEIGHTS = os.urandom((3 << 20) + 17)
FILES = {"config.json": CONFIG, "model.safetensors": WEIGHTS}


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    program = installed_registry()
    if program is None:
        pytest.skip("no registry on this machine: make registry")
    with run_registry(program) as address:
        yield address


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(client, "BACKOFF_SECONDS", 0.01)
    for name, folder in {"DOCKER_CONFIG": "docker", "XDG_RUNTIME_DIR": "run", "XDG_CONFIG_HOME": "config"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)


def model_image(registry: str, repository: str, **how: Any) -> str:
    layer = tar({f"models/{name}": content for name, content in FILES.items()}, **how)
    media = f"{TAR}+gzip" if how.get("mode") == "w:gz" else TAR
    base = tar({"etc/config.json": b"of the base image", "models/README.md": b"not needed"}, links={"bin": "usr/bin"})
    return push(f"http://{registry}", repository, "1", [(TAR, base, {}), (media, layer, {})])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("folder", ["", "#models"])
def test_a_model_image_is_unpacked_without_its_base(registry: str, tmp_path: Path, mode: str, folder: str) -> None:
    digest = model_image(registry, "car", mode=mode)
    seen: list[tuple[Any, ...]] = []
    cache = ModelCache(tmp_path / "cache")
    found = resolve(f"oci://{registry}/car:1{folder}", lambda *progress: seen.append(progress), cache)
    assert contents(found) == FILES and found.name == "models"
    assert seen[-1][:2] == ("download", 100) and seen[-1][2] == seen[-1][3] > 0
    assert resolve(f"oci://{registry}/car@{digest}{folder}", cache=cache) == found, "the same content once"


def test_an_artifact_has_a_file_in_each_layer(registry: str, tmp_path: Path) -> None:
    layers = [(RAW if name.endswith("json") else TAR, content, {TITLE: name}) for name, content in FILES.items()]  # TAR: as oras push says
    layers += [("text/plain", b"read me", {TITLE: "README.md"}), (RAW, b"{}", {"org.cncf.model.filepath": "1_Pooling/config.json"})]
    push(f"http://{registry}", "artifact", "1", layers, config=EMPTY)
    found = resolve(f"oci://{registry}/artifact:1", cache=ModelCache(tmp_path))
    assert contents(found) == FILES | {"1_Pooling/config.json": b"{}"}


def test_later_layers_replace_and_hide_files(registry: str, tmp_path: Path) -> None:
    first = tar({f"models/{name}": content for name, content in (FILES | {"old.json": b"{}", "config.json": b"old"}).items()})
    second = tar({"models/config.json": CONFIG, "models/.wh.old.json": b"", ".wh...": b""})
    push(f"http://{registry}", "layers", "1", [(TAR, first, {}), (TAR, second, {})])
    assert contents(resolve(f"oci://{registry}/layers:1", cache=ModelCache(tmp_path))) == FILES


@pytest.mark.parametrize("name", ["../../escape.json", "models/../../escape.json"])
@pytest.mark.parametrize("artifact", [False, True])
def test_a_path_that_leaves_the_image_is_refused(registry: str, tmp_path: Path, name: str, artifact: bool) -> None:
    layer = (RAW, b"{}", {TITLE: name}) if artifact else (TAR, tar({name: b"{}"}), {})
    push(f"http://{registry}", "escape", "1", [layer], config=EMPTY)
    with pytest.raises(ModelLoadError, match="whose path leaves the image"):
        resolve(f"oci://{registry}/escape:1", cache=ModelCache(tmp_path / "a" / "b"))
    assert not list(tmp_path.rglob("escape.json"))


def test_links_are_refused(registry: str, tmp_path: Path) -> None:
    push(f"http://{registry}", "links", "1", [(TAR, tar({}, links={"models/config.json": "/etc/passwd"}), {})])
    with pytest.raises(ModelLoadError, match=r"models/config\.json is a link or device"):
        resolve(f"oci://{registry}/links:1", cache=ModelCache(tmp_path))


@pytest.mark.parametrize(("uri", "says"), [("car:2", "the registry has no car:2 (404)"), ("none:1", "the registry has no none:1 (404)")])
def test_what_is_not_there_is_named(registry: str, tmp_path: Path, uri: str, says: str) -> None:
    model_image(registry, "car")
    with pytest.raises(ModelLoadError) as refused:
        resolve(f"oci://{registry}/{uri}", cache=ModelCache(tmp_path))
    assert says in str(refused.value)


class Proxy:
    """Passes on to a registry. `cut`: bytes after which a blob's answer breaks; `flip`: other bytes; `password`: Basic is needed."""

    def __init__(self, upstream: str) -> None:
        self.cut: list[int] = []
        self.flip = False
        self.token = ""
        self.ranges: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.answer(self, upstream)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler, upstream: str) -> None:
        given = request.headers.get("Authorization", "")
        if self.token and request.path.startswith("/token"):
            right = given == f"Basic {base64.b64encode(b'me:secret').decode()}"
            return self._send(request, 200 if right else 401, {}, json.dumps({"token": self.token}).encode())
        if self.token and given != f"Bearer {self.token}":
            challenge = f'Bearer realm="http://{self.address}/token",service="here",scope="repository:car:pull"'
            return self._send(request, 401, {"WWW-Authenticate": challenge}, b"")
        there = http.client.HTTPConnection(upstream, timeout=20)
        there.request("GET", request.path, headers={key: value for key, value in request.headers.items() if key != "Host"})
        found = there.getresponse()
        body = found.read()
        there.close()
        headers = {key: value for key, value in found.getheaders() if key.lower() in ("content-type", "content-length", "content-range")}
        if "/blobs/" in request.path:
            self.ranges.append(request.headers.get("Range", ""))
            if self.flip:
                body = bytes(len(body))
            if self.cut:
                body = body[: self.cut.pop(0)]
        return self._send(request, found.status, headers, body)

    def _send(self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes) -> None:
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.end_headers()
        request.wfile.write(body)


@pytest.fixture
def proxy(registry: str) -> Iterator[Proxy]:
    layers = [(RAW, content, {TITLE: name}) for name, content in FILES.items()]
    push(f"http://{registry}", "car", "1", layers[1:], config=EMPTY)
    push(f"http://{registry}", "both", "1", layers, config=EMPTY)
    with serving(Proxy(registry)) as made:
        yield made


@contextmanager
def serving(proxy: Proxy) -> Iterator[Proxy]:
    thread = Thread(target=proxy.server.serve_forever)
    thread.start()
    yield proxy
    proxy.server.shutdown()
    proxy.server.server_close()
    thread.join()


def test_a_broken_connection_is_resumed_at_its_byte(proxy: Proxy, tmp_path: Path) -> None:
    proxy.cut = [1_500_000, 1_000_000]
    with pytest.raises(ModelLoadError, match=r"no config\.json"):  # this artifact has weights only
        resolve(f"oci://{proxy.address}/car:1", cache=ModelCache(tmp_path))
    assert proxy.ranges == ["", "bytes=1500000-", "bytes=2500000-"]
    [weights] = tmp_path.rglob("model.safetensors")
    assert weights.read_bytes() == WEIGHTS


def test_a_download_that_failed_goes_on_at_the_next_start(proxy: Proxy, tmp_path: Path) -> None:
    proxy.cut = [500_000, *[0] * 20]
    with pytest.raises(ModelLoadError, match=r"the download failed: layer sha256:\w+ ended after 500000 of 3145745 bytes"):
        resolve(f"oci://{proxy.address}/car:1", cache=ModelCache(tmp_path))
    assert len(proxy.ranges) == client.ATTEMPTS
    proxy.cut, proxy.ranges = [], []
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve(f"oci://{proxy.address}/car:1", cache=ModelCache(tmp_path))
    assert proxy.ranges == ["bytes=500000-"]


def test_other_bytes_are_refused(proxy: Proxy, tmp_path: Path) -> None:
    proxy.flip = True
    with pytest.raises(ModelLoadError, match=r"layer sha256:\w+ has other content"):
        resolve(f"oci://{proxy.address}/both:1", cache=ModelCache(tmp_path))
    assert not list(tmp_path.rglob("model.safetensors"))
    proxy.flip = False
    assert contents(resolve(f"oci://{proxy.address}/both:1", cache=ModelCache(tmp_path))) == FILES


def test_other_bytes_of_an_earlier_download_are_replaced(proxy: Proxy, tmp_path: Path) -> None:
    proxy.flip, proxy.cut = True, [500_000, *[0] * 20]
    with pytest.raises(ModelLoadError, match="ended after 500000 of"):
        resolve(f"oci://{proxy.address}/car:1", cache=ModelCache(tmp_path))
    proxy.flip, proxy.cut, proxy.ranges = False, [], []
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve(f"oci://{proxy.address}/car:1", cache=ModelCache(tmp_path))
    assert proxy.ranges == ["bytes=500000-", ""]
    [weights] = tmp_path.rglob("model.safetensors")
    assert weights.read_bytes() == WEIGHTS


def test_another_manifest_than_the_digest_names_is_refused(registry: str, tmp_path: Path) -> None:
    digest = f"sha256:{hashlib.sha256(b'other').hexdigest()}"
    with pytest.raises(ModelLoadError, match=r"no car:sha256:\w+ \(404\)"):
        resolve(f"oci://{registry}/car@{digest}", cache=ModelCache(tmp_path))


def test_a_layer_of_another_size_is_refused(registry: str, tmp_path: Path) -> None:
    url = f"http://{registry}"
    push(url, "size", "0", [(RAW, CONFIG, {TITLE: "config.json"})], config=EMPTY)
    blob = {"mediaType": RAW, "digest": f"sha256:{hashlib.sha256(CONFIG).hexdigest()}", "annotations": {TITLE: "config.json"}}
    config = {"mediaType": EMPTY, "digest": f"sha256:{hashlib.sha256(b'{}').hexdigest()}", "size": 2}
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config}
    for size, says in ((len(CONFIG) - 1, "is longer than"), (len(CONFIG) + 1, "ended after")):
        push_manifest(url, "size", f"{size}", manifest | {"layers": [blob | {"size": size}]})
        with pytest.raises(ModelLoadError, match=says):
            resolve(f"oci://{registry}/size:{size}", cache=ModelCache(tmp_path))


@pytest.mark.parametrize("file", ["run/containers/auth.json", "config/containers/auth.json", "given.json"])
def test_podmans_login_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    if file == "given.json":
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / file))
    assert read_credentials("registry.example:5000") is None
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text("{}")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(json.dumps({"auths": {"registry.example:5000": {"auth": base64.b64encode(b"me:se:cret").decode()}}}))
    assert read_credentials("registry.example:5000") == ("me", "se:cret") and read_credentials("other.example") is None


def test_a_login_opens_a_private_repository(proxy: Proxy, tmp_path: Path) -> None:
    proxy.token = "opens"
    with pytest.raises(ModelLoadError, match=rf"refuses access \(401\): run `docker login {proxy.address}`"):
        resolve(f"oci://{proxy.address}/both:1", cache=ModelCache(tmp_path))
    (tmp_path / "docker").mkdir()
    login = {"auths": {proxy.address: {"auth": base64.b64encode(b"me:secret").decode()}}}
    (tmp_path / "docker" / "config.json").write_text(json.dumps(login))
    assert contents(resolve(f"oci://{proxy.address}/both:1", cache=ModelCache(tmp_path))) == FILES


def test_workers_that_start_together_share_one_download(proxy: Proxy, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: resolve(f"oci://{proxy.address}/both:1", cache=ModelCache(tmp_path)), range(2)))
    assert found[0] == found[1] and len(proxy.ranges) == len(FILES)


def test_a_complete_model_is_used_while_the_registry_is_away(registry: str, tmp_path: Path) -> None:
    proxy = Proxy(registry)
    model_image(registry, "away")
    with serving(proxy):
        found = resolve(f"oci://{proxy.address}/away:1", cache=ModelCache(tmp_path))
    assert resolve(f"oci://{proxy.address}/away:1", cache=ModelCache(tmp_path)) == found
    with pytest.raises(ModelLoadError, match="cannot be reached"):
        resolve(f"oci://{proxy.address}/away:1", cache=ModelCache(tmp_path / "other"))


def test_names_and_tags_with_dots_are_different_models_while_the_registry_is_away(registry: str, tmp_path: Path) -> None:
    proxy = Proxy(registry)
    model_image(registry, "qwen3-0.6b")
    with serving(proxy):
        resolve(f"oci://{proxy.address}/qwen3-0.6b:1", cache=ModelCache(tmp_path))
    for other in ("qwen3-0.6b:1.1", "qwen3-0.6b:2.0", "qwen3-0.9b:1", f"qwen3-0.6b@sha256:{'b' * 64}"):
        with pytest.raises(ModelLoadError, match="cannot be reached"):
            resolve(f"oci://{proxy.address}/{other}", cache=ModelCache(tmp_path))


def test_two_workers_on_a_volume_without_locks_do_not_write_the_same_part(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fairlead_worker.weights.cache.fcntl.flock", refuse)
    written = list[str]()
    download = client.Registry.download

    def record(self: client.Registry, layer: Layer, path: Path, received: Callable[[int], None]) -> None:
        written.append(path.parent.name)
        download(self, layer, path, received)

    monkeypatch.setattr(client.Registry, "download", record)
    for process in (1, 2):
        monkeypatch.setattr("fairlead_worker.weights.oci.fetch.os.getpid", lambda process=process: process)
        folder = resolve(f"oci://{proxy.address}/both:1", cache=ModelCache(tmp_path))
        assert (folder / "config.json").is_file()
        shutil.rmtree(tmp_path / "fairlead")
    assert len(set(written)) == 2, written


def test_an_index_with_an_unverifiable_digest_is_refused() -> None:
    for digest in ("sha512:abc", "../../x", "sha256:" + "A" * 64):
        with pytest.raises(ValueError, match="no sha256 digest"):
            platform_digest({"manifests": [{"digest": digest, "platform": None}]})


def test_a_full_volume_is_named_before_the_download(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_worker.weights.cache.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(ModelLoadError, match="are still to be downloaded"):
        resolve(f"oci://{proxy.address}/car:1", cache=ModelCache(tmp_path))
    assert not proxy.ranges


DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("uri", "parsed"),
    [
        ("oci://ghcr.io/org/qwen:1.0#models/8b", OciModel("ghcr.io", "org/qwen", "1.0", "models/8b")),
        (f"oci://localhost:5000/qwen:1@{DIGEST}", OciModel("localhost:5000", "qwen", DIGEST, "")),
        ("oci://org/qwen", OciModel("docker.io", "org/qwen", "latest", "")),
        ("oci://qwen:2", OciModel("docker.io", "library/qwen", "2", "")),
    ],
)
def test_names_have_the_defaults_of_a_container_runtime(uri: str, parsed: OciModel) -> None:
    assert parse_oci(to_model_uri(uri)) == parsed


def test_only_loopback_and_named_registries_are_asked_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_plain("127.0.0.1:5000") and is_plain("[::1]:5000") and is_plain("localhost")
    assert not is_plain("registry:5000") and not is_plain("ghcr.io")
    monkeypatch.setenv("FAIRLEAD_INSECURE_REGISTRIES", "other, registry:5000")
    assert is_plain("registry:5000") and not is_plain("registry")
    with pytest.raises(ModelLoadError, match="leaves the image"):
        parse_oci("oci://ghcr.io/org/qwen#../etc")


@pytest.mark.parametrize("inside", ["", "#tiny.gguf"])
def test_an_artifact_of_a_gguf_file_is_pulled(registry: str, tmp_path: Path, inside: str) -> None:
    path = write_gguf(small_model("llama"), tmp_path / "tiny.gguf", "Q8_0")
    push(f"http://{registry}", "gguf", "1", [(RAW, path.read_bytes(), {TITLE: "tiny.gguf"})], config=EMPTY)
    folder = resolve(f"oci://{registry}/gguf:1{inside}", cache=ModelCache(tmp_path / "cache"))
    assert (folder / "tiny.gguf").read_bytes() == path.read_bytes() and (folder / "tokenizer.json").is_file()

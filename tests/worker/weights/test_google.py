"""gs:// URIs. The store is moto's S3 server: obstore asks Google Cloud Storage through its XML API, which has the requests of S3."""

import base64
import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tests.servers import s3_server
from tests.worker.weights.throttle import Throttle

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights import bucket
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.uri import resolve

URI = "gs://models/tiny"
WEIGHTS = os.urandom((5 << 20) + 17)


@pytest.fixture(scope="module")
def store() -> Iterator[s3_server.S3Server]:
    problem = s3_server.install()
    if problem:
        pytest.skip(f"no S3 server: {problem}")
    with s3_server.S3Server() as server:
        server.make("models")
        server.put("models", "tiny/config.json", b'{"model_type": "llama"}')
        server.put("models", "tiny/model.safetensors", WEIGHTS)
        server.put("models", "tiny/original/old.safetensors", b"not of this model")
        yield server


@pytest.fixture
def source(store: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Throttle]:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(bucket, "RANGE_BYTES", 1 << 20)
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")  # no metadata server, also on a machine of Google's
    with Throttle(store.url) as throttle:
        throttle.open()
        monkeypatch.setenv("GOOGLE_BASE_URL", throttle.url)
        yield throttle


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def key_file(key: rsa.RSAPrivateKey) -> str:
    """A key file as `gcloud iam service-accounts keys create` writes it."""
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return json.dumps({"type": "service_account", "client_email": "w@p.iam", "private_key_id": "k1", "private_key": pem})


def test_a_model_is_downloaded_with_the_key_of_a_service_account(
    source: Throttle, key: rsa.RSAPrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", key_file(key))
    cache = ModelCache(tmp_path)
    folder = resolve(URI, cache=cache)
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS and cache.is_complete(URI, folder)
    assert len(source.passed) == 5, "in ranges, as from S3 (one of them is small)"
    (authorization,) = source.authorizations
    signed, _, signature = authorization.removeprefix("Bearer ").rpartition(".")
    key.public_key().verify(base64.urlsafe_b64decode(signature + "=="), signed.encode(), padding.PKCS1v15(), SHA256())
    claims = json.loads(base64.urlsafe_b64decode(signed.partition(".")[2] + "=="))
    assert claims["iss"] == "w@p.iam"
    assert resolve(URI, cache=cache) == folder and len(source.passed) == 5, "nothing is downloaded twice"


class _Metadata(BaseHTTPRequestHandler):
    """GKE's metadata server, which gives a pod with Workload Identity its tokens."""

    def do_GET(self) -> None:
        body = json.dumps({"access_token": "of-the-pod", "expires_in": 3600, "token_type": "Bearer"}).encode()
        is_known = self.path.startswith("/computeMetadata/v1/instance/service-accounts/default/token")
        self.send_response(200 if is_known and self.headers["Metadata-Flavor"] == "Google" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_a_pod_with_workload_identity_needs_no_secret(source: Throttle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as metadata:
        Thread(target=metadata.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{metadata.server_port}")
        assert (resolve(URI, cache=ModelCache(tmp_path)) / "model.safetensors").read_bytes() == WEIGHTS
        metadata.shutdown()
    assert source.authorizations == {"Bearer of-the-pod"}


def test_models_of_one_path_in_two_kinds_of_store_are_kept_apart(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    assert cache.folder(URI) != cache.folder(URI.replace("gs", "s3"))


@pytest.mark.parametrize(
    ("uri", "variable", "status", "message"),
    [
        (URI, {"GOOGLE_BEARER_TOKEN": "t"}, 403, "refuses access (403): the key of spec.model.secretRef"),
        (URI, {"GOOGLE_BEARER_TOKEN": "t"}, 401, "give spec.model.secretRef, a Secret with the key file of a service account"),
        (URI, {"GOOGLE_SERVICE_ACCOUNT_KEY": "no JSON"}, 0, "the credentials cannot be used: "),
        (
            URI,
            {},
            0,
            "there are no credentials: give spec.model.secretRef, a Secret with the key file of a service account, or the pod a role",
        ),
        ("gs://nobucket/tiny", {"GOOGLE_BEARER_TOKEN": "t"}, 0, "there is no such bucket (404): see spec.model.uri"),
        ("gs://models/tinny", {"GOOGLE_BEARER_TOKEN": "t"}, 0, "see spec.model.uri (gs://models/tinny)"),
        ("gs:///tiny", {}, 0, "names no bucket; write gs://bucket/folder"),
    ],
)
def test_refusals_name_the_field(
    source: Throttle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, variable: dict[str, str], status: int, message: str
) -> None:
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    source.fail = (status, b"<Error><Code>AccessDenied</Code></Error>") if status else None
    with pytest.raises(ModelLoadError) as refused:
        resolve(uri, cache=ModelCache(tmp_path))
    assert message in str(refused.value) and "\n" not in str(refused.value)

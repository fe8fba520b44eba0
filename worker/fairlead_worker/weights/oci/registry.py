"""A registry over HTTP (OCI distribution specification): manifests, and blobs that are resumed and verified."""

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.oci.credentials import read_credentials
from fairlead_worker.weights.oci.manifest import Layer, platform_digest
from fairlead_worker.weights.oci.reference import INSECURE, OciModel, is_plain

MANIFEST_BYTES = 4 << 20
"""Limit of a manifest, as in the distribution specification."""
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
ACCEPT = ", ".join(
    ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json", *INDEXES),
)
ATTEMPTS = 5
"""Attempts of a request in a row that bring less than `PROGRESS_BYTES`."""
PROGRESS_BYTES = 1 << 20
BACKOFF_SECONDS = 1.0
"""Pause after the first failed attempt, doubled after each further one."""
TIMEOUT = httpx.Timeout(60, connect=10)
CHUNK = 1 << 20
_RETRIED = (429, 500, 502, 503, 504)


class Unreachable(Exception):
    """The registry does not answer, or only with errors that may pass."""


class Hash(Protocol):
    """A running digest of hashlib."""

    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class Registry:
    """The repository of one model. Use it as a context manager; its methods may run in several threads."""

    def __init__(self, uri: str, source: OciModel) -> None:
        self._uri, self._source = uri, source
        plain = is_plain(source.registry)
        self._client = httpx.Client(
            auth=_Login(source.registry),
            timeout=TIMEOUT,
            follow_redirects=True,
            max_redirects=5,
            trust_env=not plain,  # no proxy for a registry on this machine or in this network
            event_hooks={"request": [self._check_scheme]},
        )

    def __enter__(self) -> "Registry":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def manifest(self) -> tuple[str, dict[str, Any]]:
        """Return digest and content of the manifest, of this machine's platform. Raises ModelLoadError and Unreachable."""
        digest, content = self._manifest(self._source.reference)
        if "manifests" in content:
            try:
                chosen = platform_digest(content)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelLoadError(self._uri, f"its index is refused: {error}") from error
            if chosen is None:
                raise ModelLoadError(self._uri, "the image has no manifest for this CPU architecture: name one by its digest")
            digest, content = self._manifest(chosen)
        if not isinstance(content.get("layers"), list):
            raise ModelLoadError(self._uri, "its manifest has no layers; it is neither an image nor an artifact")
        return digest, content

    def download(self, layer: Layer, path: Path, received: Callable[[int], None]) -> None:
        """Download a blob to `path`, continuing what is there, and verify it. `received` gets the bytes of each piece.

        Raises ModelLoadError and Unreachable. What was received stays at `path`, except bytes with a wrong digest. If some of those are
        from an earlier download, the blob is downloaded once more, as a whole.
        """
        if path.exists() and path.stat().st_size > layer.size:
            path.unlink()
        kept = path.stat().st_size if path.exists() else 0
        found = self._download(layer, path, received)
        if found != layer.digest and kept:
            path.unlink()
            received(-layer.size)
            found = self._download(layer, path, received)
        if found != layer.digest:
            path.unlink()
            raise ModelLoadError(self._uri, f"layer {layer.digest} has other content ({found}): the registry or a proxy changed it")

    def _download(self, layer: Layer, path: Path, received: Callable[[int], None]) -> str:
        """Download what `path` lacks of a blob. Return the digest of the whole."""
        digest, failures = hashlib.sha256(), 0
        with path.open("a+b") as file:
            file.seek(0)
            while piece := file.read(CHUNK):
                digest.update(piece)
                received(len(piece))
            while (start := file.tell()) < layer.size:
                try:
                    self._append(layer, file, digest, received)
                    problem = "the connection ended early"
                except (httpx.HTTPError, httpx.InvalidURL, Unreachable) as error:
                    problem = str(error) or type(error).__name__
                failures = 0 if file.tell() - start >= PROGRESS_BYTES else failures + 1
                if failures >= ATTEMPTS:
                    raise Unreachable(f"layer {layer.digest} ended after {file.tell()} of {layer.size} bytes: {problem}")
                if failures:
                    time.sleep(BACKOFF_SECONDS * 2 ** (failures - 1))
            file.flush()
            os.fsync(file.fileno())
        return f"sha256:{digest.hexdigest()}"

    def _append(self, layer: Layer, file: Any, digest: Hash, received: Callable[[int], None]) -> None:
        start = file.tell()
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={start}-"} if start else {})}
        with self._get(f"blobs/{layer.digest}", headers) as answer:
            skip = start if answer.status_code == 200 else 0  # the registry ignores ranges
            for piece in answer.iter_raw():
                fresh, skip = piece[skip:], max(0, skip - len(piece))
                if file.tell() + len(fresh) > layer.size:
                    raise ModelLoadError(self._uri, f"layer {layer.digest} is longer than the {layer.size} bytes of its manifest")
                file.write(fresh)
                digest.update(fresh)
                received(len(fresh))

    def _manifest(self, reference: str) -> tuple[str, dict[str, Any]]:
        content = self._read_manifest(reference)
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if reference.startswith("sha256:") and digest != reference:
            raise ModelLoadError(self._uri, f"the registry returned manifest {digest} for {reference}")
        try:
            found = json.loads(content)
            return digest, dict(found)
        except (ValueError, TypeError) as error:
            raise ModelLoadError(self._uri, f"its manifest cannot be read: {error}") from error

    def _read_manifest(self, reference: str) -> bytes:
        for attempt in range(ATTEMPTS):
            try:
                with self._get(f"manifests/{reference}", {"Accept": ACCEPT}) as answer:
                    return read_bounded(answer)
            except (httpx.HTTPError, httpx.InvalidURL, Unreachable) as error:
                problem = str(error) or type(error).__name__
            if attempt < ATTEMPTS - 1:
                time.sleep(BACKOFF_SECONDS * 2**attempt)
        raise Unreachable(problem)

    @contextmanager
    def _get(self, path: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        with self._client.stream("GET", f"{self._source.base_url}/{path}", headers=headers) as answer:
            if answer.status_code in _RETRIED:
                raise Unreachable(f"it answered {answer.status_code}")
            if answer.status_code == 416:
                raise Unreachable("it has no further bytes (416)")
            if answer.status_code in (401, 403):
                login = f"docker login {self._source.registry}"
                raise ModelLoadError(
                    self._uri,
                    f"the registry refuses access ({answer.status_code}): run `{login}`, or set DOCKER_CONFIG to its folder",
                )
            if answer.status_code == 404:
                what = f"no {self._source.repository}:{self._source.reference}" if path.startswith("manifests/") else f"no {path}"
                raise ModelLoadError(self._uri, f"the registry has {what} (404)")
            if answer.status_code not in (200, 206):
                raise ModelLoadError(self._uri, f"the registry answered {answer.status_code} for {path}")
            yield answer

    def _check_scheme(self, request: httpx.Request) -> None:
        host = request.url.netloc.decode()
        if request.url.scheme != "https" and not is_plain(host):
            raise ModelLoadError(self._uri, f"{host} is to be asked without TLS: add it to {INSECURE} if that is intended")


def read_bounded(answer: httpx.Response) -> bytes:
    """Return the body. Raises httpx.ReadError if it is longer than a manifest may be."""
    content = bytearray()
    for piece in answer.iter_bytes():
        content += piece
        if len(content) > MANIFEST_BYTES:
            raise httpx.ReadError(f"an answer of more than {MANIFEST_BYTES} bytes")
    return bytes(content)


class _Login(httpx.Auth):
    """Answers a registry's 401 with Basic authentication or with a token of the service that it names. Never answers other hosts."""

    def __init__(self, registry: str) -> None:
        self._registry = registry
        self._header = ""

    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if self._header:
            request.headers["Authorization"] = self._header
        answer = yield request
        if answer.status_code != 401 or _origin(answer.url) != _origin(request.url):
            return
        kind, _, rest = answer.headers.get("WWW-Authenticate", "").partition(" ")
        known = read_credentials(self._registry)
        basic = f"Basic {base64.b64encode(':'.join(known).encode()).decode()}" if known else ""
        if kind.lower() == "bearer":
            fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
            query = {key: fields[key] for key in ("service", "scope") if key in fields}
            headers = {"Authorization": basic} if basic else {}
            token = yield httpx.Request("GET", httpx.URL(fields.get("realm", "")).copy_merge_params(query), headers=headers)
            if token.status_code in _RETRIED:
                raise Unreachable(f"its token service answered {token.status_code}")
            if token.status_code != 200:
                return
            if int(token.headers.get("content-length") or 0) > MANIFEST_BYTES:
                raise httpx.ReadError(f"a token of more than {MANIFEST_BYTES} bytes")
            self._header = f"Bearer {_read_token(token.read())}"
        elif kind.lower() == "basic" and basic:
            self._header = basic
        else:
            return
        request.headers["Authorization"] = self._header
        yield request


def _origin(url: httpx.URL) -> tuple[str, bytes]:
    return url.scheme, url.netloc


def _read_token(content: bytes) -> str:
    """Return the token of a token service's answer. Raises httpx.ReadError if it has none."""
    try:
        found = json.loads(content)
        token = found.get("token") or found["access_token"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise httpx.ReadError("the token service's answer has no token") from error
    return str(token)

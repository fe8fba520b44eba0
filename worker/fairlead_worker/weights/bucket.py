"""`s3://bucket/folder`, `gs://bucket/folder`: objects of a store, downloaded in parallel ranges and resumed after an interruption.

Credentials and endpoint come from the AWS_* variables that every AWS client reads, from obstore's GOOGLE_* variables, or from the pod's
own role (IRSA, Workload Identity). obstore (the Rust crate object_store) signs and retries. A file beside each incomplete one records
the ranges that are present.
"""

import fnmatch
import os
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Literal

import obstore
import xxhash
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import GCSStore, S3Store

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.progress import Progress

if TYPE_CHECKING:
    from obstore import GetOptions

RANGE_BYTES = 16 << 20
RANGES_AT_ONCE = 8
"""One connection to S3 gives about 100 MB/s. AWS advises ranges of 8 to 16 MiB, and as many in parallel as the network carries."""
RETRY_SECONDS = 60
UNREACHABLE = "the bucket cannot be reached: see spec.model.endpoint, or the network policies of the namespace"
SECRETS = {"s3": "a Secret with AWS_ACCESS_KEY_ID", "gs": "a Secret with the key file of a service account"}


@dataclass(frozen=True, slots=True)
class BucketModel:
    """`s3://bucket[/folder][/file.gguf]` or `gs://bucket[/folder][/file.gguf]`."""

    bucket: str
    folder: str
    scheme: Literal["s3", "gs"] = "s3"
    file: str = ""


@dataclass(frozen=True, slots=True)
class _Object:
    name: str
    size: int
    tag: str
    """The server's ETag, which changes with the content."""


def fetch(uri: str, source: BucketModel, patterns: list[str], cache: ModelCache, progress: Progress) -> Path:
    """Download the model's files, which are directly in the bucket's folder; return the local folder. Raises ModelLoadError."""
    store = connect(uri, source)
    with cache.lock(uri, progress) as report:
        folder = cache.folder(uri)
        try:
            wanted = _list_objects(uri, store, patterns)
        except (BaseError, OSError) as error:
            if isinstance(error, OSError | PermissionDeniedError | UnauthenticatedError) or not cache.is_complete(uri, folder):
                raise explain_error(uri, error) from error
            report("download", 100, note=f"the bucket cannot be reached, and {folder} is complete")
            return folder
        damaged = cache.is_damaged(uri, folder)
        folder.mkdir(parents=True, exist_ok=True)
        missing = [one for one in wanted if damaged or not _is_there(folder, one)]
        parts = [_Part(folder, one) for one in missing]
        cache.check_space(uri, sum(part.missing_bytes for part in parts))
        try:
            _Download(store, parts, sum(one.size for one in wanted), report).run()
        except (BaseError, FileNotFoundError) as error:  # FileNotFoundError: an object was removed
            raise explain_error(uri, error) from error
        for stray in {path.name for path in folder.iterdir()} - {one.name for one in wanted} - {_tag_file(one.name) for one in wanted}:
            (folder / stray).unlink(missing_ok=True)
        if missing or not cache.is_complete(uri, folder):
            cache.mark_complete(uri, folder)
        return folder


def connect(uri: str, source: BucketModel) -> S3Store | GCSStore:
    kind, endpoint = (S3Store, "AWS_ENDPOINT_URL") if source.scheme == "s3" else (GCSStore, "GOOGLE_BASE_URL")
    retries = {"max_retries": 6, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
    plain = os.environ.get(endpoint, "").startswith("http://")
    options = {"allow_http": plain, "timeout": timedelta(seconds=RETRY_SECONDS), "connect_timeout": timedelta(seconds=10)}
    try:
        return kind(source.bucket, prefix=source.folder or None, retry_config=retries, client_options=options)  # type: ignore[arg-type]
    except (BaseError, OSError) as error:  # of a key file that cannot be read
        raise ModelLoadError(uri, f"the credentials cannot be used: {_text(error)}; see spec.model.secretRef") from error


def _list_objects(uri: str, store: S3Store | GCSStore, patterns: list[str]) -> list[_Object]:
    listed = obstore.list_with_delimiter(store)["objects"]
    names = [(one["path"].rpartition("/")[2], one) for one in listed]
    found = [_Object(name, one["size"], one["e_tag"] or "") for name, one in names if any(fnmatch.fnmatch(name, each) for each in patterns)]
    if not found:
        raise ModelLoadError(uri, f"there is no model file in that folder of the bucket: see spec.model.uri ({uri})")
    return found


def explain_error(uri: str, error: Exception) -> ModelLoadError:
    message, secret = _text(error), SECRETS[uri.partition(":")[0]]
    missing = ModelLoadError(uri, f"there are no credentials: give spec.model.secretRef, {secret}, or the pod a role")
    # From the node's metadata service, the last place searched for credentials; its 403 is not the store's.
    if "/latest/" in message or "computeMetadata" in message:
        return missing
    if isinstance(error, PermissionDeniedError) or "403 Forbidden" in message:
        return ModelLoadError(uri, "the store refuses access (403): the key of spec.model.secretRef, or the pod's role, may not read it")
    if isinstance(error, UnauthenticatedError) or "401 Unauthorized" in message:
        return ModelLoadError(uri, f"the store asks for credentials (401): give spec.model.secretRef, {secret}")
    if "NoSuchBucket" in message:
        return ModelLoadError(uri, "there is no such bucket (404): see spec.model.uri and spec.model.endpoint")
    if isinstance(error, PreconditionError):
        return ModelLoadError(uri, "an object was replaced during its download (412): retry when no process writes to the bucket")
    if isinstance(error, FileNotFoundError):
        return ModelLoadError(uri, "an object was removed during its download (404): retry when no process writes to the bucket")
    if "credential" in message.lower():
        return missing
    if "error sending request" in message or "HTTP error" in message:
        return ModelLoadError(uri, f"{UNREACHABLE} ({message[:300]})")
    return ModelLoadError(uri, f"the store answered: {message[:500]}")


def _text(error: Exception) -> str:
    """Return an error of obstore in one line, without its chain of causes."""
    return " ".join(str(error).split("Debug source")[0].split())


class _Part:
    """An incomplete file: its bytes in `NAME.ETAG.part`, and one byte for each present range in `….ranges`."""

    def __init__(self, folder: Path, wanted: _Object) -> None:
        self.wanted = wanted
        self._path = folder / wanted.name
        stem = f".{wanted.name}.{xxhash.xxh3_64_hexdigest(f'{wanted.tag} {wanted.size} {RANGE_BYTES}'.encode())}"
        self._bytes, self._marks = folder / f"{stem}.part", folder / f"{stem}.ranges"
        count = -(-wanted.size // RANGE_BYTES)
        marks = self._marks.read_bytes() if self._marks.exists() and self._bytes.exists() else b""
        self._done = bytearray(marks[:count].ljust(count, b"\0"))

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield (number, bytes) of the missing ranges."""
        for number, done in enumerate(self._done):
            if not done:
                yield number, min(RANGE_BYTES, self.wanted.size - number * RANGE_BYTES)

    @property
    def missing_bytes(self) -> int:
        return sum(size for _, size in self.ranges())

    def begin(self) -> None:
        for path in (self._bytes, self._marks):
            with path.open("ab"):
                pass
        with self._bytes.open("r+b") as file:
            file.truncate(self.wanted.size)
        self._marks.write_bytes(self._done)

    def take(self, number: int, data: memoryview) -> None:
        """Write one range. It is synced to the volume before it counts: after a power loss, holes must not look complete."""
        with self._bytes.open("r+b", buffering=0) as file:
            written, start = 0, number * RANGE_BYTES
            while written < len(data):
                written += os.pwrite(file.fileno(), data[written:], start + written)
            os.fdatasync(file.fileno())
        self._done[number] = 1
        with self._marks.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"\1", number)

    def end(self) -> None:
        self._bytes.replace(self._path)
        self._marks.unlink()
        _tag_path(self._path.parent, self.wanted.name).write_text(self.wanted.tag)


class _Download:
    """All missing ranges of all files, several in parallel."""

    def __init__(self, store: S3Store | GCSStore, parts: list[_Part], total: int, report: Progress) -> None:
        self._store, self._parts, self._total, self._report = store, parts, total, report
        self._done = total - sum(part.missing_bytes for part in parts)
        self._counting = Lock()
        self._stopped = Event()

    def run(self) -> None:
        """Download all ranges. Raises the error of the first failing range; present ranges stay."""
        with ThreadPoolExecutor(RANGES_AT_ONCE, thread_name_prefix="download") as threads:
            for part in self._parts:
                part.begin()
                waiting = [threads.submit(self._fetch, part, number, size) for number, size in part.ranges()]
                try:
                    for finished in wait(waiting, return_when=FIRST_EXCEPTION).done:
                        finished.result()
                except BaseException:
                    self._stopped.set()
                    threads.shutdown(wait=False, cancel_futures=True)
                    raise
                part.end()

    def _fetch(self, part: _Part, number: int, size: int) -> None:
        if self._stopped.is_set():
            return
        start, tag = number * RANGE_BYTES, part.wanted.tag
        # If-Match pins the listed object: ranges of two contents would give a mixed file of the right size and name.
        options: GetOptions = {"range": (start, start + size), **({"if_match": tag} if tag else {})}
        data = memoryview(obstore.get(self._store, part.wanted.name, options=options).bytes())
        if len(data) != size:
            raise PreconditionError(f"{len(data)} bytes of {part.wanted.name} were received instead of {size}")
        part.take(number, data)
        with self._counting:
            self._done += size
            done = self._done
        self._report("download", 100 * done // self._total, done, self._total)


def _is_there(folder: Path, wanted: _Object) -> bool:
    path, tag = folder / wanted.name, _tag_path(folder, wanted.name)
    return path.is_file() and path.stat().st_size == wanted.size and tag.is_file() and tag.read_text() == wanted.tag


def _tag_file(name: str) -> str:
    return f".{name}.etag"


def _tag_path(folder: Path, name: str) -> Path:
    return folder / _tag_file(name)

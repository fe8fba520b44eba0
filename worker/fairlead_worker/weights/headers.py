"""Configs and headers of a model without its weights: remote files of weights become sparse files that have their headers only.

So code that reads shapes and dtypes of a folder reads those of a remote model too.
"""

import json
from collections.abc import Callable
from pathlib import Path

import obstore
from huggingface_hub import hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]  # it exports them
from obstore.exceptions import BaseError

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights import bucket, hub
from fairlead_worker.weights.bucket import BucketModel
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.gguf.folder import gguf_folder
from fairlead_worker.weights.gguf.reader import part_paths
from fairlead_worker.weights.hub import HubModel
from fairlead_worker.weights.oci.reference import OciModel
from fairlead_worker.weights.progress import no_progress
from fairlead_worker.weights.uri import parse_uri, resolve

SMALL = ["config.json", "generation_config.json", "*.index.json", "modules.json", "sentence_bert_config.json", "tokenizer_config.json"]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
GGUF_HEADER = 64 << 20
"""Bytes of a GGUF file that hold its header: with Gemma's vocabulary of 262,144 it takes 15 MB."""
LARGEST_HEADER = 100_000_000
"""Of a safetensors file, as the library limits it."""
PARTIAL = 206
"""HTTP status of a range; a server that knows none sends the whole file."""
ReadRange = Callable[[str, int, int], tuple[bytes, int]]
"""Returns the bytes of a file from `begin` to `end`, fewer if the file ends before, and the size of the file."""


def resolve_headers(uri: str, scratch: Path) -> Path:
    """Return a folder as `weights.uri.resolve` does. Of a remote model it has the small files, and headers; they are put into `scratch`.

    Raises ModelLoadError.
    """
    cache = ModelCache(scratch)
    match parse_uri(uri):
        case HubModel() as source:
            read = _hub_reader(uri, source)
            if source.file:
                return _describe_gguf(uri, source.file, scratch, read, cache)
            folder = hub.fetch(uri, source, SMALL, cache, no_progress)
        case BucketModel() as source:
            read = _bucket_reader(uri, source)
            if source.file:
                return _describe_gguf(uri, source.file, scratch, read, cache)
            folder = bucket.fetch(uri, source, SMALL, cache, no_progress)
        case OciModel():
            raise ModelLoadError(uri, "an image cannot be read in part: pull it, and name the folder of its files (file:///…)")
        case Path():
            return resolve(uri, cache=cache)
    if not (folder / "config.json").is_file():
        raise ModelLoadError(uri, "it has no config.json; it is not a transformers model (name a GGUF file of it, if it has one)")
    for name in _weight_files(uri, folder):
        write_header(uri, name, folder, read)
    return folder


def write_header(uri: str, name: str, folder: Path, read: ReadRange) -> None:
    """Write the safetensors file `name` with its header only: its tensors are holes. Raises ModelLoadError."""
    start, size = read(name, 0, 8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size, LARGEST_HEADER):
        raise ModelLoadError(uri, f"{name} is not a safetensors file")
    _write_sparse(folder / name, start + read(name, 8, 8 + length)[0], size)


def _weight_files(uri: str, folder: Path) -> list[str]:
    try:
        return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values())) if (folder / INDEX).is_file() else [SINGLE]
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelLoadError(uri, f"{INDEX} cannot be read: {error!r}") from error


def _describe_gguf(uri: str, file: str, scratch: Path, read: ReadRange, cache: ModelCache) -> Path:
    for part in part_paths(Path(file)):
        _write_sparse(scratch / part.name, *read(str(part), 0, GGUF_HEADER))
    return gguf_folder(uri, scratch / Path(file).name, cache)


def _write_sparse(path: Path, start: bytes, size: int) -> None:
    path.unlink(missing_ok=True)  # a link of the hub's client
    path.write_bytes(start)
    with path.open("r+b") as file:
        file.truncate(size)


def _hub_reader(uri: str, source: HubModel) -> ReadRange:
    def read(name: str, begin: int, end: int) -> tuple[bytes, int]:
        try:
            answer = get_session().get(
                hf_hub_url(source.repository, name, revision=source.revision),
                headers=build_hf_headers() | {"Range": f"bytes={begin}-{end - 1}"},
                follow_redirects=True,
                timeout=60,
            )
            hf_raise_for_status(answer)
        except (hub.HTTP_ERROR, OSError) as error:
            raise ModelLoadError(uri, f"{name} cannot be read from the hub: {error}") from error
        content: bytes = answer.content if answer.status_code == PARTIAL else answer.content[begin:end]
        return content, int(answer.headers.get("Content-Range", f"/{len(answer.content)}").rpartition("/")[2])

    return read


def _bucket_reader(uri: str, source: BucketModel) -> ReadRange:
    store = bucket.connect(uri, source)

    def read(name: str, begin: int, end: int) -> tuple[bytes, int]:
        try:
            size = obstore.head(store, name)["size"]
            return bytes(obstore.get_range(store, name, start=begin, end=min(end, size))), size
        except (BaseError, OSError) as error:
            raise bucket.explain_error(uri, error) from error

    return read

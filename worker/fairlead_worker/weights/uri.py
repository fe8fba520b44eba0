"""From a model URI to a folder of files: a local folder, or a download into the cache. No torch."""

from pathlib import Path
from urllib.parse import unquote, urlparse

from huggingface_hub.constants import HF_HOME

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights import bucket, hub
from fairlead_worker.weights.bucket import BucketModel
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.hub import HubModel
from fairlead_worker.weights.oci.fetch import fetch as fetch_oci
from fairlead_worker.weights.oci.manifest import MODELS
from fairlead_worker.weights.oci.reference import OciModel, parse_oci
from fairlead_worker.weights.progress import Progress, no_progress

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
"""The files of a repository that a model needs. Pickled weights, images and other frameworks' files are excluded."""


def parse_uri(uri: str) -> Path | HubModel | BucketModel | OciModel:
    """Parse a URI into a local folder, a hub repository, a bucket folder or an image. Raises ModelLoadError for others."""
    parsed = urlparse(uri)
    if parsed.scheme in ("", "file"):
        if parsed.scheme == "file" and parsed.netloc not in ("", "localhost"):
            raise ModelLoadError(uri, f"file URIs name no host, and this one names {parsed.netloc!r}; write file:///path")
        path = Path(unquote(parsed.path) if parsed.scheme else uri)
        if not path.is_absolute():
            raise ModelLoadError(uri, "not an absolute path; write file:///path, /path or hf://org/name")
        return path
    if parsed.scheme == "hf":
        repository, _, revision = uri.removeprefix("hf://").partition("@")
        if not repository.strip("/") or repository.count("/") > 1:
            raise ModelLoadError(uri, "not a hub repository; write hf://org/name or hf://org/name@revision")
        return HubModel(repository.strip("/"), revision or None)
    if parsed.scheme in ("s3", "gs"):
        if not parsed.netloc:
            raise ModelLoadError(uri, f"names no bucket; write {parsed.scheme}://bucket/folder")
        return BucketModel(parsed.netloc, parsed.path.strip("/"), "s3" if parsed.scheme == "s3" else "gs")
    if parsed.scheme == "oci":
        return parse_oci(uri)
    known = "file:///path, /path, hf://org/name[@revision], s3://bucket/folder, gs://bucket/folder or oci://image[#folder]"
    raise ModelLoadError(uri, f"unknown scheme {parsed.scheme!r}; use {known}")


def resolve(uri: str, progress: Progress = no_progress, cache: ModelCache | None = None, *, required_file: str = "config.json") -> Path:
    """Return the folder with the model's files, downloaded into `cache` if they are remote. Raises ModelLoadError.

    `required_file`: the file that identifies the folder's content (an adapter's is adapter_config.json).
    """
    cache = cache or ModelCache(Path(HF_HOME))
    match parse_uri(uri):
        case HubModel() as source:
            folder = hub.fetch(uri, source, FILES, cache, progress)
        case BucketModel() as source:
            folder = bucket.fetch(uri, source, FILES, cache, progress)
        case OciModel() as source:
            folder = fetch_oci(uri, source, FILES, cache, progress)
        case folder:
            pass
    if not (folder / required_file).is_file() and (folder / MODELS / required_file).is_file():
        folder = folder / MODELS  # of an image as KServe describes it, pulled here or mounted in a pod
    if not folder.exists():
        raise ModelLoadError(uri, f"there is no {folder}; correct the path, or mount its volume")
    if not folder.is_dir():
        raise ModelLoadError(uri, f"{folder} is not a folder; name the folder that holds {required_file}")
    if not (folder / required_file).is_file():
        kind = "a transformers model" if required_file == "config.json" else "what this wants"
        raise ModelLoadError(uri, f"no {required_file} in {folder}; it is not {kind}")
    return folder

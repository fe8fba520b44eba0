"""From a model URI to a folder of files: a local folder, or a download into the cache. No torch."""

from pathlib import Path
from urllib.parse import unquote, urlparse

from huggingface_hub.constants import HF_HOME

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights import bucket, hub
from fairlead_worker.weights.bucket import BucketModel
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.gguf.folder import gguf_folder, whole_models
from fairlead_worker.weights.gguf.reader import part_paths
from fairlead_worker.weights.hub import HubModel
from fairlead_worker.weights.oci.fetch import fetch as fetch_oci
from fairlead_worker.weights.oci.manifest import MODELS
from fairlead_worker.weights.oci.reference import OciModel, parse_oci
from fairlead_worker.weights.progress import Progress, no_progress

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
"""The files of a repository that a model needs. Pickled weights, images and other frameworks' files are excluded."""
CONFIG = "config.json"
GGUF = ".gguf"
"""The end of a URI that names one file of many: a repository has a model in a dozen types, and one of them is served."""
FORMS = (
    "file:///path, /path, hf://org/name[/FILE.gguf][@revision], s3://bucket/folder[/FILE.gguf], gs://bucket/folder[/FILE.gguf] or "
    "oci://image[#folder or #FILE.gguf]"
)


def parse_uri(uri: str) -> Path | HubModel | BucketModel | OciModel:
    """Parse a URI into a local folder or GGUF file, a hub repository, a bucket folder or an image. Raises ModelLoadError for others."""
    parsed = urlparse(uri)
    if parsed.scheme in ("", "file"):
        if parsed.scheme == "file" and parsed.netloc not in ("", "localhost"):
            raise ModelLoadError(uri, f"file URIs name no host, and this one names {parsed.netloc!r}; write file:///path")
        path = Path(unquote(parsed.path) if parsed.scheme else uri)
        if not path.is_absolute():
            raise ModelLoadError(uri, "not an absolute path; write file:///path, /path or hf://org/name")
        return path
    if parsed.scheme == "hf":
        place, _, revision = uri.removeprefix("hf://").partition("@")
        names = place.strip("/").split("/")
        if not names[0] or (len(names) > 2) != names[-1].endswith(GGUF):
            raise ModelLoadError(uri, "not a hub repository; write hf://org/name, hf://org/name@revision or hf://org/name/FILE.gguf")
        return HubModel("/".join(names[:2]), revision or None, "/".join(names[2:]))
    if parsed.scheme in ("s3", "gs"):
        if not parsed.netloc:
            raise ModelLoadError(uri, f"names no bucket; write {parsed.scheme}://bucket/folder")
        folder, file = _split_file(parsed.path.strip("/"))
        return BucketModel(parsed.netloc, folder, "s3" if parsed.scheme == "s3" else "gs", file)
    if parsed.scheme == "oci":
        return parse_oci(uri)
    raise ModelLoadError(uri, f"unknown scheme {parsed.scheme!r}; use {FORMS}")


def _split_file(path: str) -> tuple[str, str]:
    """Return the folder and the GGUF file of a path; without one, the path itself and an empty name."""
    folder, _, name = path.rpartition("/")
    return (folder, name) if name.endswith(GGUF) else (path, "")


def _patterns(file: str) -> list[str]:
    """Return the files to download: those of a repository, or one GGUF file with all its parts."""
    return [str(part) for part in part_paths(Path(file))] if file else FILES


def resolve(uri: str, progress: Progress = no_progress, cache: ModelCache | None = None, *, required_file: str = CONFIG) -> Path:
    """Return the folder with the model's files, downloaded into `cache` if they are remote. Raises ModelLoadError.

    A GGUF file, or a folder of nothing else, becomes a folder that describes it. `required_file`: the file that identifies the folder's
    content (an adapter's is adapter_config.json).
    """
    cache = cache or ModelCache(Path(HF_HOME))
    file = ""
    match parse_uri(uri):
        case HubModel(file=file) as source:
            folder = hub.fetch(uri, source, _patterns(file), cache, progress)
        case BucketModel(file=file) as source:
            folder = bucket.fetch(uri, source, _patterns(file), cache, progress)
        case OciModel(file=file) as source:
            # An image holds one model, so that a GGUF file in it need not be named.
            folder = fetch_oci(uri, source, _patterns(file) if file else [*FILES, f"*{GGUF}"], cache, progress)
        case folder:
            if folder.suffix == GGUF and not folder.is_dir():
                folder, file = folder.parent, folder.name
    if file:
        return _describe(uri, folder / file, cache)
    if not _holds_model(folder, required_file) and _holds_model(folder / MODELS, required_file):
        folder = folder / MODELS  # of an image as KServe describes it, pulled here or mounted in a pod
    if not folder.exists():
        raise ModelLoadError(uri, f"there is no {folder}; correct the path, or mount its volume")
    if not folder.is_dir():
        raise ModelLoadError(uri, f"{folder} is a file, not a folder that holds {required_file}; names of GGUF files end in {GGUF}")
    models = whole_models(folder) if required_file == CONFIG else []
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:4])
        raise ModelLoadError(uri, f"there are {len(models)} GGUF models in {folder}, such as {names}: name one")
    if models and not (folder / CONFIG).is_file():
        return _describe(uri, models[0], cache)
    if not (folder / required_file).is_file():
        kind = "a transformers model" if required_file == CONFIG else "what this wants"
        raise ModelLoadError(uri, f"no {required_file} in {folder}; it is not {kind}")
    return folder


def _holds_model(folder: Path, required_file: str) -> bool:
    return (folder / required_file).is_file() or (required_file == CONFIG and bool(whole_models(folder)))


def _describe(uri: str, path: Path, cache: ModelCache) -> Path:
    """Return the folder for a GGUF file. Raises ModelLoadError."""
    if not path.is_file():
        raise ModelLoadError(uri, f"there is no {path}; correct the path, or mount its volume")
    return gguf_folder(uri, path, cache)

"""From an adapter's URI to its folder, like a model's but with another required file. No torch, so that the API process can download
too.
"""

from contextlib import suppress
from pathlib import Path

from fairlead_worker.errors import AdapterError, ModelLoadError
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.progress import Progress, no_progress
from fairlead_worker.weights.uri import resolve

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CHUNK = 1 << 24


def adapter_folder(name: str, uri: str, progress: Progress = no_progress, cache: ModelCache | None = None) -> Path:
    """Return the folder with adapter_config.json, downloaded if it is remote. Raises AdapterError."""
    try:
        return resolve(uri, progress, cache, required_file=CONFIG)
    except ModelLoadError as error:
        raise AdapterError(name, uri, error.cause) from error


def warm_folder(name: str, uri: str, cache: ModelCache | None = None) -> Path:
    """Return the same folder after reading its files once. Raises AdapterError, unless a file is just missing.

    An engine reads the files between two steps. A storage that hangs must block the caller here, and not all streams.
    """
    folder = adapter_folder(name, uri, cache=cache)
    check_readable(name, uri, folder)
    for file in (CONFIG, WEIGHTS):
        with suppress(OSError), (folder / file).open("rb", buffering=0) as opened:  # the engine reports what is wrong with a file
            while opened.read(CHUNK):
                pass
    return folder


def check_readable(name: str, uri: str, folder: Path) -> None:
    """Raise AdapterError for a path that exists and is no regular file: reading a pipe may never end."""
    for file in (CONFIG, WEIGHTS):
        if (folder / file).exists() and not (folder / file).is_file():
            raise AdapterError(name, uri, f"{folder / file} is not a regular file")

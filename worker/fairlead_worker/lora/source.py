"""From an adapter's URI to its folder: as a model's, found by another file. No torch, so that the API process can fetch too."""

from contextlib import suppress
from pathlib import Path

from fairlead_worker.errors import AdapterError, ModelLoadError
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.progress import Progress, no_progress
from fairlead_worker.weights.uri import resolve

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CHUNK = 1 << 24


def adapter_folder(name: str, uri: str, progress: Progress = no_progress, cache: ModelCache | None = None) -> Path:
    """The folder with adapter_config.json, downloaded first where it is not on this machine. Raises AdapterError."""
    try:
        return resolve(uri, progress, cache, required_file=CONFIG)
    except ModelLoadError as error:
        raise AdapterError(name, uri, error.cause) from error


def warmed_folder(name: str, uri: str, cache: ModelCache | None = None) -> Path:
    """The same, with its files read once. An engine reads them between two steps: a source that hangs must hang whoever calls this, and
    not all streams. Raises AdapterError, unless a file is just not there."""
    folder = adapter_folder(name, uri, cache=cache)
    check_readable(name, uri, folder)
    for file in (CONFIG, WEIGHTS):
        with suppress(OSError), (folder / file).open("rb", buffering=0) as opened:  # the engine says what is wrong with it
            while opened.read(CHUNK):
                pass
    return folder


def check_readable(name: str, uri: str, folder: Path) -> None:
    """Raises AdapterError for what is there and no file: reading a pipe may never end."""
    for file in (CONFIG, WEIGHTS):
        if (folder / file).exists() and not (folder / file).is_file():
            raise AdapterError(name, uri, f"{folder / file} is no file")

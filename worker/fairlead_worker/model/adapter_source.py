"""From an adapter's URI to its folder: as a model's, found by another file. No torch, so that the API process can fetch too."""

from pathlib import Path

from fairlead_worker.model.cache import ModelCache
from fairlead_worker.model.errors import AdapterError, ModelLoadError
from fairlead_worker.model.progress import Progress, no_progress
from fairlead_worker.model.uri import resolve


def adapter_folder(name: str, uri: str, progress: Progress = no_progress, cache: ModelCache | None = None) -> Path:
    """The folder with adapter_config.json, downloaded first where it is not on this machine. Raises AdapterError."""
    try:
        return resolve(uri, progress, cache, holds="adapter_config.json")
    except ModelLoadError as error:
        raise AdapterError(name, uri, error.cause) from error

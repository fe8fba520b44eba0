"""From a model URI to a folder of files: local paths, and the Hugging Face hub through its own client. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from fairlead_worker.model.errors import ModelLoadError

Progress = Callable[[str, int], None]
"""Called with a phase ("config", "download", "weights") and a percentage."""

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
"""What a model needs of a repository: not its pickled weights, images or other frameworks' files."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """`hf://org/name[@revision]`."""

    repository: str
    revision: str | None


def no_progress(phase: str, percent: int) -> None:
    """A Progress that tells nobody."""


def parse_uri(uri: str) -> Path | HubModel:
    """A local folder or a hub repository. ModelLoadError on any other scheme or shape."""
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
    raise ModelLoadError(uri, f"unknown scheme {parsed.scheme!r}; use file:///path, /path or hf://org/name[@revision]")


def resolve(uri: str, progress: Progress = no_progress, *, holds: str = "config.json") -> Path:
    """The folder that holds the model's files, downloaded first where they are on the hub. Raises ModelLoadError.

    `holds`: the file without which it is something else (an adapter's is adapter_config.json).
    """
    source = parse_uri(uri)
    folder = _download(uri, source, progress) if isinstance(source, HubModel) else source
    if not folder.exists():
        raise ModelLoadError(uri, f"there is no {folder}; is the volume mounted?")
    if not folder.is_dir():
        raise ModelLoadError(uri, f"{folder} is not a folder; name the folder that holds {holds}")
    if not (folder / holds).is_file():
        kind = "a transformers model" if holds == "config.json" else "what this wants"
        raise ModelLoadError(uri, f"no {holds} in {folder}; it is not {kind}")
    return folder


def _download(uri: str, source: HubModel, progress: Progress) -> Path:
    revision = f" at {source.revision}" if source.revision else ""
    try:
        return Path(
            snapshot_download(source.repository, revision=source.revision, allow_patterns=FILES, tqdm_class=_reporting_bar(progress))
        )
    except HFValidationError as error:
        raise ModelLoadError(uri, str(error)) from error
    except GatedRepoError as error:
        raise ModelLoadError(uri, "the repository is gated (403): accept its terms on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(uri, f"the repository has no revision {source.revision!r} (404)") from error
    except RepositoryNotFoundError as error:
        status = error.response.status_code
        raise ModelLoadError(uri, f"no such repository, or it is private and HF_TOKEN does not open it ({status})") from error
    except HfHubHTTPError as error:
        raise ModelLoadError(uri, f"the hub answered {error.response.status_code}{revision}: {_hint(error)}") from error
    except LocalEntryNotFoundError as error:
        cause = error.__cause__
        if isinstance(cause, HfHubHTTPError):
            raise ModelLoadError(uri, f"the hub answered {cause.response.status_code}{revision}: {_hint(cause)}") from error
        raise ModelLoadError(uri, f"the hub cannot be reached and the files are not cached here ({cause or error})") from error
    except OSError as error:
        raise ModelLoadError(uri, f"download failed: {error}") from error


def _hint(error: HfHubHTTPError) -> str:
    if error.response.status_code in (401, 403):
        return "HF_TOKEN is missing or does not allow it"
    return error.server_message or "try again later, or mirror the model and use file:///"


def _reporting_bar(progress: Progress) -> type[tqdm]:
    """A silent progress bar class for the hub client that reports the bytes received."""

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                progress("download", min(100, int(100 * self.n / self.total)))
            return shown

    return Bar


class _Nowhere:
    """A stream that swallows the bar."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

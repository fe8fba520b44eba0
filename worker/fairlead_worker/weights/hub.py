"""`hf://org/name[/file.gguf][@revision]` through the Hugging Face hub's own client, which resumes interrupted downloads."""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.progress import Progress

REFUSALS = (HFValidationError, GatedRepoError, RevisionNotFoundError, RepositoryNotFoundError)
"""Answers of the hub that no later attempt changes."""
HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""The base of the errors of the client's HTTP library: httpx, or httpx2 in newer releases."""
CHECK_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class HubModel:
    """`hf://org/name[/file.gguf][@revision]`."""

    repository: str
    revision: str | None
    file: str = ""


def check_exists(uri: str, source: HubModel) -> None:
    """Ask the hub for the repository. Raises ModelLoadError if it refuses. Returns if it does not answer within `CHECK_SECONDS`."""
    try:
        HfApi().model_info(source.repository, revision=source.revision, timeout=CHECK_SECONDS)
    except REFUSALS as error:
        raise _explain_refusal(uri, source, error) from error
    except (HTTP_ERROR, OSError):
        return  # the files may be in the cache


def fetch(uri: str, source: HubModel, patterns: list[str], cache: ModelCache, progress: Progress) -> Path:
    """Download the model's files; return their folder. Raises ModelLoadError."""
    if cache.read_only:
        return _download(uri, source, patterns, cache, progress, present=True)
    with cache.lock(uri, progress) as report:
        folder = _download(uri, source, patterns, cache, report)
        if cache.is_damaged(uri, folder):  # the client compares names only
            folder = _download(uri, source, patterns, cache, report, force=True)
        if not cache.is_complete(uri, folder):
            cache.mark_complete(uri, folder)
        return folder


def _download(
    uri: str, source: HubModel, patterns: list[str], cache: ModelCache, progress: Progress, *, force: bool = False, present: bool = False
) -> Path:
    """`force`: download existing files again. `present`: use existing files only."""
    revision = f" at {source.revision}" if source.revision else ""
    try:
        return Path(
            snapshot_download(
                source.repository,
                revision=source.revision,
                allow_patterns=patterns,
                tqdm_class=_reporting_bar(progress),
                cache_dir=HF_HUB_CACHE if cache.root == Path(HF_HOME) else cache.root / "hub",  # HF_HUB_CACHE may be set separately
                force_download=force,
                local_files_only=present,
            )
        )
    except REFUSALS as error:
        raise _explain_refusal(uri, source, error) from error
    except HfHubHTTPError as error:
        raise ModelLoadError(uri, f"the hub answered {error.response.status_code}{revision}: {_hint(error)}") from error
    except LocalEntryNotFoundError as error:
        if present:
            raise ModelLoadError(
                uri,
                f"it is not in {cache.root}, which cannot be written: make spec.model.cache (FAIRLEAD_MODEL_CACHE) writable, or fill it",
            ) from error
        cause = error.__cause__
        if isinstance(cause, HfHubHTTPError):
            raise ModelLoadError(uri, f"the hub answered {cause.response.status_code}{revision}: {_hint(cause)}") from error
        raise ModelLoadError(uri, f"the hub cannot be reached and the files are not cached here ({cause or error})") from error
    except HTTP_ERROR as error:  # the connection broke: the client looks into its cache only if it cannot be opened
        raise ModelLoadError(uri, f"the hub cannot be reached ({type(error).__name__}: {error})") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS):
            raise cache.explain(uri, error) from error
        raise ModelLoadError(uri, f"download failed: {error}") from error
    except RuntimeError as error:  # raised by the hub's native transfer
        if "No space left" in str(error):
            raise cache.explain(uri, OSError(errno.ENOSPC, str(error))) from error
        raise ModelLoadError(uri, f"download failed: {error}") from error


def _explain_refusal(uri: str, source: HubModel, error: Exception) -> ModelLoadError:
    match error:
        case GatedRepoError():  # a subclass of RepositoryNotFoundError
            cause = (
                "the repository is gated (403): accept its terms on the hub, and give a token of that account: "
                "HF_TOKEN (spec.model.secretRef)"
            )
        case RevisionNotFoundError():
            cause = f"the repository has no revision {source.revision!r} (404)"
        case RepositoryNotFoundError():
            status = error.response.status_code
            cause = f"no such repository, or it is private and HF_TOKEN (spec.model.secretRef) does not open it ({status})"
        case _:
            cause = str(error)
    return ModelLoadError(uri, cause)


def _hint(error: HfHubHTTPError) -> str:
    if error.response.status_code in (401, 403):
        return "HF_TOKEN (spec.model.secretRef) is missing or does not allow it"
    return error.server_message or "try again later, or mirror the model and use file:///"


def _reporting_bar(progress: Progress) -> type[tqdm]:
    """Return a silent progress bar class for the hub client that reports the bytes received."""

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                progress("download", min(100, int(100 * self.n / self.total)), int(self.n), int(self.total))
            return shown

    return Bar


class _Nowhere:
    """A stream that discards the bar."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Do nothing: the stream has no buffer."""

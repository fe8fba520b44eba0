"""Download of an image's model for several workers: the local cluster has no container runtime that could mount the image."""

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from fairlead.local.pod import PodState
from fairlead.serve.model import ModelRefused
from fairlead.serve.progress import StartUpProgress
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.uri import resolve


@dataclass
class Download:
    """The state of a download, shown as a pod's is."""

    name: str = "model"
    state: PodState = field(default_factory=lambda: PodState("loading", 0, reason="download"))


class _Stopped(Exception):
    """The command ends, so the download is no longer needed."""


async def download(uri: str, cache: str, console: Console) -> str:
    """Download a model into `cache` (empty: the default one), with its progress, and return the URI of its folder. Raises ModelRefused."""
    loop, stopped, shown = asyncio.get_running_loop(), threading.Event(), Download()
    progress = StartUpProgress(console, lambda: [shown])

    def report(phase: str, percent: int, done: int = 0, total: int = 0, note: str = "") -> None:
        """Called by the threads of the download."""
        if stopped.is_set():
            raise _Stopped
        loop.call_soon_threadsafe(show, PodState("loading", percent, done, total, phase))

    def show(state: PodState) -> None:
        if not stopped.is_set():
            shown.state = state
            progress.update()

    with progress:
        try:
            folder = await asyncio.to_thread(resolve, uri, report, ModelCache(Path(cache)) if cache else None)
        except ModelLoadError as error:
            raise ModelRefused(f"{uri}: {error.cause}") from None
        finally:
            stopped.set()
    return folder.as_uri()

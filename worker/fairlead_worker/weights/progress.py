"""Progress reports of a load."""

from typing import Protocol


class Progress(Protocol):
    """Progress callback, called from any thread with a phase (as in `messages.Loading`) and its percentage."""

    def __call__(self, phase: str, percent: int, done: int = 0, total: int = 0, note: str = "") -> None:
        """Report `done` of `total` bytes if they are known; `note` adds text for people."""


def no_progress(phase: str, percent: int, done: int = 0, total: int = 0, note: str = "") -> None:
    """Discard the progress."""

"""How a load tells how far it is."""

from typing import Protocol


class Progress(Protocol):
    """Called from any thread, with a phase (as in `messages.Loading`) and how much of it is done."""

    def __call__(self, phase: str, percent: int, done: int = 0, total: int = 0, note: str = "") -> None:
        """`done` of `total` bytes where they are known; `note` says more for people."""


def no_progress(phase: str, percent: int, done: int = 0, total: int = 0, note: str = "") -> None:
    """A Progress that tells nobody."""

"""Warnings in a response header: unknown request fields, which are ignored as OpenAI's clients expect, and parts without effect."""

import logging
from collections.abc import Iterable
from contextvars import ContextVar

logger = logging.getLogger(__name__)

HEADER = b"x-fairlead-warning"
MAX_SHOWN = 10
"""Unknown fields in one header."""
MAX_LOGGED = 256
"""Names that are logged, each once. A client could otherwise fill the log with names that it makes up."""

_warnings: ContextVar[list[str] | None] = ContextVar("request_warnings", default=None)
"""The warnings of the current request. A context variable, because the decoders of bodies do not know the response."""
_logged: set[str] = set()


def begin_request() -> list[str]:
    """Start to collect for the current request. Return the list to which warnings are added."""
    found: list[str] = []
    _warnings.set(found)
    return found


def add_warnings(warnings: Iterable[str]) -> None:
    """Add ASCII texts for the response header."""
    if (found := _warnings.get()) is not None:
        found += warnings


def report_unknown_fields(names: Iterable[str]) -> None:
    """Warn of unknown fields, and log names that were not logged before.

    Only plain identifiers are shown: a client can put anything into a name.
    """
    shown = sorted(name for name in names if len(name) <= 64 and name.isascii() and name.isidentifier())
    if shown:
        add_warnings([f"ignored unknown fields: {', '.join(shown[:MAX_SHOWN])}"])
    new = [name for name in shown if name not in _logged][: MAX_LOGGED - len(_logged)]
    if new:
        _logged.update(new)
        logger.warning("ignored unknown request fields, each logged once: %s", ", ".join(new))


def format_header(warnings: Iterable[str]) -> bytes:
    """Return the value of the response header."""
    return "; ".join(warnings).encode()

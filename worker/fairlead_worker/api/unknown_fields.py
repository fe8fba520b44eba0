"""Unknown request fields: ignored as OpenAI's clients expect of a server, but named in a response header and in the log."""

import logging
from collections.abc import Iterable
from contextvars import ContextVar

logger = logging.getLogger(__name__)

HEADER = b"x-fairlead-warning"
MAX_SHOWN = 10
"""Names in one header."""
MAX_LOGGED = 256
"""Names that are logged, each once. A client could otherwise fill the log with names that it makes up."""

_found: ContextVar[list[str] | None] = ContextVar("unknown_fields", default=None)
"""The unknown fields of the current request. A context variable, because the decoders of bodies do not know the response."""
_logged: set[str] = set()


def begin_request() -> list[str]:
    """Start to collect for the current request. Return the list to which names are added."""
    found: list[str] = []
    _found.set(found)
    return found


def report_unknown_fields(names: Iterable[str]) -> None:
    """Note unknown fields for the response header, and log names that were not logged before.

    Only plain identifiers are shown: a client can put anything into a name.
    """
    shown = sorted(name for name in names if len(name) <= 64 and name.isascii() and name.isidentifier())
    if (found := _found.get()) is not None:
        found += shown[:MAX_SHOWN]
    new = [name for name in shown if name not in _logged][: MAX_LOGGED - len(_logged)]
    if new:
        _logged.update(new)
        logger.warning("ignored unknown request fields, each logged once: %s", ", ".join(new))


def format_header(names: Iterable[str]) -> bytes:
    """Return the value of the response header."""
    return f"ignored unknown fields: {', '.join(names)}".encode()

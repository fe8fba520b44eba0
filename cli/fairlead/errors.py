"""Errors that a user can correct: a command prints one line and exits with 2, without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit


class UserError(Exception):
    """An error whose message is all that the user sees: what is wrong, the value, and what to do next."""


class PipeClosed(Exception):
    """A BrokenPipeError of a command. Typer would end the process on that with status 1."""


@contextmanager
def reading(flag: str, path: Path) -> Iterator[None]:
    """Name the flag and the file in the error of a text file that cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{flag} {path}: not a text file ({error.reason})") from None


def check_http_url(source: str, url: str) -> str:
    """Return the URL without a final slash or `/v1`. `source`: the flag or argument that gave it. Raises UserError."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UserError(f"{source} {url}: must be http://HOST[:PORT] or https://HOST[:PORT]")
    return url.rstrip("/").removesuffix("/v1")

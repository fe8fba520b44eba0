"""Errors that a user can correct: a command prints one line and exits with 2, without a traceback."""

from urllib.parse import urlsplit


class UserError(Exception):
    """An error whose message is all that the user sees: what is wrong, the value, and what to do next."""


class PipeClosed(Exception):
    """A BrokenPipeError of a command. Typer would end the process on that with status 1."""


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

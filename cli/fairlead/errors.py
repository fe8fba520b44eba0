"""Errors that a user can correct: a command prints one line and exits with 2, without a traceback."""

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit


class UserError(Exception):
    """An error whose message is all that the user sees: what is wrong, the value, and what to do next."""


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


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> None:
    """Parse the command line, run its command and exit with its status."""
    words = sys.argv[1:] if argv is None else list(argv)
    end = words.index("--") if "--" in words else len(words)
    arguments, unknown = parser.parse_known_args(words[:end], argparse.Namespace(flags=words[end + 1 :]))
    if unknown:
        command = f"{parser.prog} {arguments.command}"
        print(f"{command}: unknown argument {' '.join(unknown)}; `{command} --help` lists the arguments", file=sys.stderr)
        sys.exit(2)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
    except UserError as error:
        print(f"{parser.prog} {arguments.command}: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        if not _reader_left():
            raise
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def _reader_left() -> bool:
    """Return whether the reader of standard output closed it, as `head` does. If so, later output goes to /dev/null."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # poll reports errors even without requested events
    left = bool(output.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left

"""Errors that a person caused and can repair: a command prints them as one line and exits 2, without a traceback."""

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence


class UserError(Exception):
    """What was wrong, the value, and what to do. The message is all that the person sees."""


def finish(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> None:
    """Run what is asked for and exit."""
    arguments = parser.parse_args(argv)
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
    """Whoever read the output has seen enough, as `head` does. Then nothing more is written to it."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # an error is told in any case
    left = bool(output.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left

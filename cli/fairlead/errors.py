"""Errors that a person caused and can repair: a command prints them as one line and exits 2, without a traceback."""

import argparse
import sys
from collections.abc import Sequence


class UserError(Exception):
    """What was wrong, the value, and what to do. The message is all that the person sees."""


def finish(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> None:
    """Run what is asked for and exit."""
    arguments = parser.parse_args(argv)
    try:
        code = arguments.run(arguments)
    except UserError as error:
        print(f"{parser.prog} {arguments.command}: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)

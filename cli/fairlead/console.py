"""One way to print for all commands."""

import sys

from rich.console import Console


def make_console() -> Console:
    """As wide as the terminal; 140 columns into a file or a pipe, where 80 would break every table."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)

"""The console that all commands print to."""

import sys

from rich.console import Console


def make_console() -> Console:
    """Return a console as wide as the terminal. Files and pipes get 140 columns, because 80 would break every table."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)

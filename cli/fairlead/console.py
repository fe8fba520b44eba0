"""The console that all commands print to, and tables that fit into it."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_GAP = 2
"""Columns between two columns of a table."""


def make_console() -> Console:
    """Return a console as wide as the terminal. Files and pipes get 140 columns, because 80 would break every table."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def fit_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int, width: int, optional: Sequence[str] = ()) -> Table:
    """Return a table of at most `width` characters: it leaves out `optional` columns, the first first, until the rest fits.

    `left`: number of columns that are aligned to the left; the others are figures. Cells may have markup.
    """
    widths = [max(Text.from_markup(line[at]).cell_len for line in [headers, *rows]) + _GAP for at in range(len(headers))]
    kept = list(range(len(headers)))
    for name in optional:
        if sum(widths[at] for at in kept) - _GAP <= width:
            break
        kept = [at for at in kept if headers[at] != name]
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    for at in kept:
        table.add_column(headers[at], no_wrap=True, justify="left" if at < left else "right")
    for row in rows:
        table.add_row(*(row[at] for at in kept))
    return table

"""`fairlead schedule FILE`: draw what `fairlead-worker --trace-schedule FILE` wrote."""

import argparse
import re
import shutil
from pathlib import Path

from fairlead.errors import UserError
from fairlead.schedule import svg, text
from fairlead.schedule.trace import read


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("schedule", help="draw a worker's steps: who prefilled, who decoded, how long it took")
    parser.add_argument("file", type=Path, metavar="FILE", help="what `fairlead-worker --trace-schedule FILE` wrote")
    parser.add_argument("--steps", default="", metavar="A:B", help="these steps only, both included; either may be left out")
    parser.add_argument(
        "--list", action="store_true", help="a line for each step instead of the picture; r0+2/5: 2 of 5 guesses were right"
    )
    parser.add_argument("--svg", type=Path, metavar="OUT", help="write the picture to OUT, step times as widths")
    parser.add_argument("--width", type=int, default=0, help="characters in a line (default: the terminal's)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """UserError for a file that is no trace."""
    trace = read(arguments.file)
    if arguments.steps:
        found = re.fullmatch(r"(\d*):(\d*)", arguments.steps)
        if not found:
            raise UserError(f"--steps {arguments.steps!r}: give A:B, as in 10:50")
        trace = trace.part(int(found[1] or 0), int(found[2] or len(trace.steps)))
    if not trace.steps:
        raise UserError(f"{arguments.file}: no steps in it{' that --steps names' if arguments.steps else ' yet'}")
    print(text.summary(trace))
    if arguments.svg:
        try:
            arguments.svg.write_text(svg.svg(trace))
        except OSError as error:
            raise UserError(f"--svg {arguments.svg}: {error.strerror}") from None
        print(f"drawn in {arguments.svg}")
        return 0
    print(f"{text.legend()}\n" if not arguments.list else "")
    for line in text.listing(trace) if arguments.list else text.grid(trace, arguments.width or shutil.get_terminal_size().columns):
        print(line)
    return 0

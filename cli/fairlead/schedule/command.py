"""`fairlead schedule FILE`: draw what `fairlead-worker --trace-schedule FILE` wrote."""

import argparse
import re
import shutil
from pathlib import Path

from fairlead.errors import UserError
from fairlead.schedule import svg, text
from fairlead.schedule.trace import read


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("schedule", help="draw a worker's steps: which requests prefilled or decoded, and how long each step took")
    parser.add_argument("file", type=Path, metavar="FILE", help="file that `fairlead-worker --trace-schedule FILE` wrote")
    parser.add_argument("--steps", default="", metavar="A:B", help="steps A to B only, inclusive; either may be omitted")
    parser.add_argument(
        "--list", action="store_true", help="one line per step instead of the picture; r0+2/5: 2 of 5 draft tokens accepted"
    )
    parser.add_argument("--svg", type=Path, metavar="OUT", help="write the picture to OUT, step times as widths")
    parser.add_argument("--width", type=int, default=0, help="characters per line (default: the terminal's width)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw the trace. Raises UserError for a file that is not a trace."""
    trace = read(arguments.file)
    if arguments.steps:
        found = re.fullmatch(r"(\d*):(\d*)", arguments.steps)
        if not found:
            raise UserError(f"--steps {arguments.steps!r}: give A:B, as in 10:50")
        trace = trace.part(int(found[1] or 0), int(found[2] or len(trace.steps)))
    if not trace.steps:
        raise UserError(f"{arguments.file}: no steps{' in the range of --steps' if arguments.steps else ' yet'}")
    print(text.describe(trace))
    if arguments.svg:
        try:
            arguments.svg.write_text(svg.draw_svg(trace))
        except OSError as error:
            raise UserError(f"--svg {arguments.svg}: {error.strerror}") from None
        print(f"drawn in {arguments.svg}")
        return 0
    print(f"{text.draw_legend()}\n" if not arguments.list else "")
    for line in text.list_steps(trace) if arguments.list else text.draw_grid(trace, arguments.width or shutil.get_terminal_size().columns):
        print(line)
    return 0

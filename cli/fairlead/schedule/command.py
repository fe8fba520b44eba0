"""`fairlead schedule FILE`: draw what `fairlead-worker --trace-schedule FILE` wrote."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fairlead.errors import UserError
from fairlead.options import takes
from fairlead.program import describe, new_app
from fairlead.schedule import perfetto, text
from fairlead.schedule.trace import read
from fairlead_common.schedule.svg import draw_svg
from fairlead_common.schedule.trace import describe as describe_trace

app = new_app()


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """The options of `fairlead schedule`."""

    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that `fairlead-worker --trace-schedule FILE` wrote.")]
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B only, inclusive; either may be omitted.")] = ""
    list: Annotated[
        bool, typer.Option("--list", help="One line per step instead of the picture; r0+2/5: 2 of 5 draft tokens accepted.")
    ] = False
    svg: Annotated[Path | None, typer.Option(metavar="OUT", help="Write the picture to OUT, step times as widths.")] = None
    perfetto: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write Chrome trace JSON to OUT, for ui.perfetto.dev or chrome://tracing.")
    ] = None
    width: Annotated[int, typer.Option(metavar="N", help="Characters per line; 0: the terminal's width.")] = 0


@app.command(
    help=describe(
        "Draw a worker's steps: which requests prefilled or decoded, and how long each step took.",
        "fairlead schedule steps.jsonl --steps 100:200",
        "fairlead schedule steps.jsonl --perfetto steps.json",
    )
)
@takes(ScheduleOptions)
def run(options: ScheduleOptions) -> int:
    """Draw the trace. Raises UserError for a file that is not a trace."""
    trace = read(options.file)
    if options.steps:
        found = re.fullmatch(r"(\d*):(\d*)", options.steps)
        if not found:
            raise UserError(f"--steps {options.steps!r}: give A:B, as in 10:50")
        trace = trace.part(int(found[1] or 0), int(found[2] or len(trace.steps)))
    if not trace.steps:
        raise UserError(f"{options.file}: no steps{' in the range of --steps' if options.steps else ' yet'}")
    print(describe_trace(trace))
    if options.svg or options.perfetto:
        for flag, path, draw in (("svg", options.svg, draw_svg), ("perfetto", options.perfetto, perfetto.draw_trace)):
            if path:
                _write(flag, path, draw(trace))
        return 0
    print(f"{text.draw_legend()}\n" if not options.list else "")
    for line in text.list_steps(trace) if options.list else text.draw_grid(trace, options.width or shutil.get_terminal_size().columns):
        print(line)
    return 0


def _write(flag: str, path: Path, content: str) -> None:
    try:
        path.write_text(content)
    except OSError as error:
        raise UserError(f"--{flag} {path}: {error.strerror}") from None
    print(f"drawn in {path}")

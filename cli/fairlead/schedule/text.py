"""A schedule as text: one line per request, one column per step."""

from collections.abc import Iterator, Sequence

from fairlead_common.schedule.trace import Row, Step, Trace

CHUNK, LAST, DECODE, NOTHING = "▒", "█", "·", " "
_LEVELS = " ▁▂▃▄▅▆▇█"


def draw_legend() -> str:
    return f"{CHUNK} chunk of a prompt   {LAST} last chunk, first token   {DECODE} decode"


def draw_grid(trace: Trace, width: int) -> Iterator[str]:
    """Yield lines of at most `width` characters: bands of steps, each followed by the prefill tokens and the times of its steps."""
    names = trace.requests
    margin = max([len("prefill"), *map(len, names)]) + 1
    columns = max(10, width - margin)
    most_tokens = max((step.prefill_tokens for step in trace.steps), default=0)
    most_seconds = max((step.seconds for step in trace.steps), default=0.0)
    for at in range(0, len(trace.steps), columns):
        band = trace.steps[at : at + columns]
        yield f"{'step':<{margin}}{_ruler(band)}".rstrip()
        present = {row.request for step in band for row in step.rows}
        cells = [{row.request: _cell(row) for row in step.rows} for step in band]
        for name in names:
            if name in present:
                yield f"{name:<{margin}}{''.join(cell.get(name, NOTHING) for cell in cells)}".rstrip()
        yield f"{'prefill':<{margin}}{''.join(_bar(step.prefill_tokens, most_tokens) for step in band)}  up to {most_tokens} tokens"
        yield f"{'time':<{margin}}{''.join(_bar(step.seconds, most_seconds) for step in band)}  up to {most_seconds * 1000:.1f} ms"
        yield ""


def list_steps(trace: Trace) -> Iterator[str]:
    """Yield one line per step: the requests that prefilled and decoded. `r0+2/5`: a decode with five draft tokens, two accepted."""
    for step in trace.steps:
        parts = [f"{row.request}[{row.start}:{row.start + row.count}]{'*' if row.samples else ''}" for row in step.rows if not row.decode]
        decodes = [f"{row.request}{_describe_draft(row)}" for row in step.rows if row.decode]
        prefill = f"prefill {' '.join(parts)}" if parts else ""
        decode = f"decode {' '.join(decodes)}" if decodes else ""
        yield f"{step.number:>6} {step.seconds * 1000:>9.2f} ms  {'  '.join(filter(None, (prefill, decode)))}"


def _describe_draft(row: Row) -> str:
    return f"+{'?' if row.accepted is None else row.accepted}/{row.drafted}" if row.drafted else ""


def _cell(row: Row) -> str:
    return DECODE if row.decode else LAST if row.samples else CHUNK


def _ruler(band: Sequence[Step]) -> str:
    marks = ""
    for column, step in enumerate(band):
        if step.number % 10 == 0 and len(marks) <= column:
            marks = f"{marks:<{column}}{step.number} "
    return marks[: len(band) + 8]


def _bar(value: float, most: float) -> str:
    if value <= 0 or most <= 0:
        return _LEVELS[0]
    return _LEVELS[max(1, round(value / most * (len(_LEVELS) - 1)))]

"""A schedule as an SVG: time on the x axis, one lane per request. A chunk that is wide enough shows its number of tokens."""

from html import escape
from itertools import pairwise

from fairlead_common.schedule.trace import Row, Trace, describe

_LANE, _MARGIN, _TOP, _WIDTH = 18, 90, 44, 1200
_COLORS = {"chunk": "#7aa6d8", "last": "#1f5fa8", "decode": "#e6a23c"}


def draw_svg(trace: Trace) -> str:
    """Return the document. Widths are step times: all decodes of a step wait for its end."""
    names = {name: lane for lane, name in enumerate(trace.requests)}
    steps = trace.steps
    # Idle time between steps is left out: only computing time is shown.
    edges = [0.0]
    for step in steps:
        edges.append(edges[-1] + step.seconds)
    scale = (_WIDTH - _MARGIN - 10) / (edges[-1] or 1.0)
    height = _TOP + _LANE * len(names) + 24
    title = escape(describe(trace).splitlines()[0])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/><text x="8" y="16">{title}</text>',
    ]
    for at, (kind, color) in enumerate(_COLORS.items()):
        label = {"chunk": "chunk of a prompt", "last": "last chunk, first token", "decode": "decode"}[kind]
        parts.append(
            f'<rect x="{8 + at * 170}" y="24" width="12" height="12" fill="{color}"/><text x="{24 + at * 170}" y="34">{label}</text>'
        )
    parts += [f'<text x="8" y="{_TOP + lane * _LANE + 13}">{escape(name)}</text>' for name, lane in names.items()]
    for step, (left, right) in zip(steps, pairwise(edges), strict=True):
        for row in step.rows:
            x, width, y = _MARGIN + left * scale, (right - left) * scale, _TOP + names[row.request] * _LANE
            tokens = f"{row.request}[{row.start}:{row.start + row.count}]"
            tip = f"step {step.number}, {step.seconds * 1000:.2f} ms: {tokens}{_describe_draft(row)}"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(width - 0.5, 0.3):.2f}" height="{_LANE - 3}" fill="{_COLORS[_kind(row)]}">'
                f"<title>{escape(tip)}</title></rect>"
            )
            if not row.decode and width > 7 * len(str(row.count)):
                parts.append(f'<text x="{x + 2:.2f}" y="{y + 12}" fill="white">{row.count}</text>')
    parts.append(f'<text x="{_MARGIN}" y="{height - 8}">0</text>')
    parts.append(f'<text x="{_WIDTH - 10}" y="{height - 8}" text-anchor="end">{edges[-1] * 1000:.0f} ms of computing</text></svg>')
    return "\n".join(parts) + "\n"


def _describe_draft(row: Row) -> str:
    drafted = f"{row.drafted} draft token{'s' if row.drafted > 1 else ''}"
    return "" if not row.drafted else f", {drafted}" if row.accepted is None else f", {row.accepted} of {drafted} accepted"


def _kind(row: Row) -> str:
    return "decode" if row.decode else "last" if row.samples else "chunk"

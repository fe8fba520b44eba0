"""The result of a benchmark as one HTML file: figures, and plots as inline SVG. It refers to no other host."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from fairlead.bench.report import PERCENTILES, percentile

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 220, 56, 28
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2rem auto;max-width:1180px;color:#222}table{border-collapse:collapse;margin:1rem 0}"
    "td,th{padding:.25rem .9rem;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
    "figure{display:inline-block;margin:.5rem}figcaption{font-weight:600}.failed{color:#b00}"
)
_TIMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "latency"}


def draw_report(result: dict[str, Any]) -> str:
    """Return the document for a result of `compute_figures` with its header."""
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_title(result)}</title><style>{_STYLE}</style></head>',
            "<body>",
            f"<h1>{_title(result)}</h1>",
            *_summary(result),
            *_plots(result),
            *_failures(result["errors"]),
            "</body></html>\n",
        ]
    )


def _title(result: dict[str, Any]) -> str:
    return escape(f"{result['model_id']}: {result['label']}, {result['num_prompts']} prompts, {result['date']}")


def _summary(result: dict[str, Any]) -> Iterator[str]:
    facts = {
        "API": result["backend"],
        "completed": f"{result['completed']} of {result['completed'] + result['failed']}",
        "duration": f"{result['duration']:.2f} s",
        "request rate": f"{result['request_rate']} /s, burstiness {result['burstiness']:g}",
        "requests": f"{result['request_throughput']:.2f} /s",
        "output tokens": f"{result['output_throughput']:.1f} /s",
        "cached prompt tokens": f"{100 * result['cached_fraction']:.1f} %",
    }
    yield "<table>" + "".join(f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items()) + "</table>"
    columns = ["mean", "median", *(f"p{each}" for each in PERCENTILES)]
    yield "<table><tr><th>ms</th>" + "".join(f"<th>{column}</th>" for column in columns) + "</tr>"
    for name, title in _TIMES.items():
        yield f"<tr><td>{title}</td>" + "".join(f"<td>{result[f'{column}_{name}_ms']:.2f}</td>" for column in columns) + "</tr>"
    yield "</table>"


def _plots(result: dict[str, Any]) -> Iterator[str]:
    """Yield distributions of the times, then TTFT over the run and the tokens of each second."""
    good = [number for number, error in enumerate(result["errors"]) if not error]
    if not good:
        return
    first = min(result["start_times"][number] for number in good)
    ttfts = [1000 * result["ttfts"][number] for number in good]
    starts = [result["start_times"][number] - first for number in good]
    gaps = [1000 * gap for number in good for gap in result["itls"][number]]
    yield _plot("TTFT, share of requests", "ms", _cumulative(ttfts), "%")
    yield _plot("ITL, share of gaps", "ms", _cumulative(gaps), "%")
    yield _plot("latency, share of requests", "s", _cumulative([result["latencies"][number] for number in good]), "%")
    yield _plot("TTFT of each request", "s after the start", sorted(zip(starts, ttfts, strict=True)), "ms", dots=True)
    yield _plot("tokens of each second", "s after the start", _token_rate(result, good, first), "tokens/s")


def _cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return at most 200 points of the cumulative distribution, in percent."""
    return [(percentile(values, step / 2), step / 2) for step in range(201)] if values else []


def _token_rate(result: dict[str, Any], good: Sequence[int], first: float) -> list[tuple[float, float]]:
    seconds: dict[int, int] = {}
    for number in good:
        at = result["start_times"][number] - first + result["ttfts"][number]
        for gap in (0.0, *result["itls"][number]):
            at += gap
            seconds[int(at)] = seconds.get(int(at), 0) + 1
    return [(float(second), float(seconds.get(second, 0))) for second in range(max(seconds) + 1)]


def _plot(title: str, x_unit: str, points: Sequence[tuple[float, float]], y_unit: str, *, dots: bool = False) -> str:
    """Return a figure with axes from zero."""
    right, top = max((x for x, _ in points), default=0.0) or 1.0, max((y for _, y in points), default=0.0) or 1.0
    width, height = _WIDTH - _LEFT - 10, _HEIGHT - _BOTTOM - 10
    placed = [(_LEFT + width * x / right, 10 + height * (1 - y / top)) for x, y in points]
    if dots:
        shape = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#1f5fa8" fill-opacity=".6"/>' for x, y in placed)
    else:
        shape = f'<polyline fill="none" stroke="#1f5fa8" stroke-width="2" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in placed)}"/>'
    marks = "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{10 + height * (1 - share):.0f}" y2="{10 + height * (1 - share):.0f}" stroke="#ddd"/>'
        f'<text x="{_LEFT - 6}" y="{14 + height * (1 - share):.0f}" text-anchor="end">{top * share:.4g}</text>'
        f'<text x="{_LEFT + width * share:.0f}" y="{_HEIGHT - 12}" text-anchor="middle">{right * share:.4g}</text>'
        for share in (0, 0.5, 1)
    )
    labels = f'<text x="{_WIDTH - 10}" y="{_HEIGHT}" text-anchor="end">{escape(x_unit)}</text><text x="2" y="10">{escape(y_unit)}</text>'
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-size="11">{marks}{labels}{shape}</svg></figure>'
    )


def _failures(errors: Sequence[str]) -> Iterator[str]:
    failed = [error for error in errors if error]
    yield from (f'<p class="failed">failed: {escape(error)}</p>' for error in failed[:5])
    if len(failed) > 5:
        yield f'<p class="failed">… and {len(failed) - 5} more</p>'

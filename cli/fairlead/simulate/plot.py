"""The outcome as an SVG: the distribution of TTFT and the cached share of the prompts for each policy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from fairlead.simulate.outcome import Outcome

_WIDTH, _HEIGHT, _TOP, _BOTTOM = 1200, 560, 64, 56
_CURVES = (60, 760)  # left and right edge of the distribution; the bars are to the right of it
_BARS = (920, 1130)
COLORS = ("#d62728", "#e8833a", "#1f5fa8", "#2a9d8f", "#8e5ea2", "#b08d57", "#6b7280", "#9aa5b1", "#c9a0dc", "#4d7c3a")
_POINTS = 240


@dataclass(frozen=True, slots=True)
class _Curve:
    """A policy's runs together."""

    policy: str
    ttft: list[float]
    hit_rate: float

    @property
    def mean(self) -> float:
        return fmean(self.ttft)


def draw_svg(runs: Mapping[str, Sequence[Outcome]], title: str) -> str:
    """Return the document. Left part: the share of requests (y) with a first token within the time (x, logarithmic seconds)."""
    curves = [
        _Curve(policy, sorted(seconds for one in outcomes for seconds in one.served) or [math.inf], fmean(one.hit_rate for one in outcomes))
        for policy, outcomes in runs.items()
    ]
    low = max(0.01, min(curve.ttft[0] for curve in curves))
    high = max((curve.ttft[-1] for curve in curves if curve.ttft[-1] < math.inf), default=1.0)
    scale = _Log(low, max(high, 2 * low), *_CURVES)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/><text x="{_CURVES[0]}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{_CURVES[0]}" y="46">share of requests with their first token within … seconds</text>',
        f'<text x="{_BARS[0] - 120}" y="46">prompt tokens cached</text>',
        f'<text x="{_WIDTH - 12}" y="46" text-anchor="end">mean s</text>',
        *_grid(scale),
    ]
    colors = COLORS * (1 + len(curves) // len(COLORS))
    drawn = sorted(zip(curves, colors, strict=False), key=lambda each: each[0].mean)
    for curve, color in reversed(drawn):  # the best one is drawn last, on top
        parts.append(_draw_curve(curve, color, scale))
    for row, (curve, color) in enumerate(drawn):
        parts += _bar(curve, color, row, max(each.hit_rate for each in curves))
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Log:
    """A logarithmic scale from seconds to x."""

    def __init__(self, low: float, high: float, left: float, right: float) -> None:
        self.low, self.high = low, high
        self._left, self._per = left, (right - left) / math.log(high / low)

    def __call__(self, seconds: float) -> float:
        return self._left + math.log(max(seconds, self.low) / self.low) * self._per


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _grid(scale: _Log) -> list[str]:
    lines = []
    for share in (0, 0.25, 0.5, 0.75, 0.9, 1):
        y = _y(share)
        lines.append(f'<line x1="{_CURVES[0]}" x2="{_CURVES[1]}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e6ea"/>')
        lines.append(f'<text x="{_CURVES[0] - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for power in range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1):
        for digit in (1, 2, 5):
            seconds = digit * 10.0**power
            if scale.low <= seconds <= scale.high:
                x = scale(seconds)
                lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_y(0):.1f}" y2="{_y(1):.1f}" stroke="#e3e6ea"/>')
                lines.append(f'<text x="{x:.1f}" y="{_y(0) + 18:.1f}" text-anchor="middle">{seconds:g}</text>')
    return lines


def _draw_curve(curve: _Curve, color: str, scale: _Log) -> str:
    times = [min(seconds, 1e9) for seconds in curve.ttft]
    places = [min(len(times) - 1, round(number / _POINTS * (len(times) - 1))) for number in range(_POINTS + 1)]
    points = " ".join(f"{scale(times[at]):.1f},{_y((at + 1) / len(times)):.1f}" for at in places)
    width = 3 if curve.policy == "fairlead" else 1.6
    drawing = f'points="{points}" fill="none" stroke="{color}" stroke-width="{width}"'
    return f"<polyline {drawing}><title>{escape(curve.policy)}</title></polyline>"


def _bar(curve: _Curve, color: str, row: int, most: float) -> list[str]:
    y, length = _TOP + row * 40, (_BARS[1] - _BARS[0] - 40) * curve.hit_rate / (most or 1)
    weight = ' font-weight="bold"' if curve.policy == "fairlead" else ""
    return [
        f'<text x="{_BARS[0] - 8}" y="{y + 16}" text-anchor="end"{weight}>{escape(curve.policy)}</text>',
        f'<rect x="{_BARS[0]}" y="{y}" width="{length:.1f}" height="24" fill="{color}"/>',
        f'<text x="{_BARS[0] + length + 6:.1f}" y="{y + 16}">{curve.hit_rate:.1%}</text>',
        f'<text x="{_WIDTH - 12}" y="{y + 16}" text-anchor="end"{weight}>{curve.mean:.2f}</text>',
    ]

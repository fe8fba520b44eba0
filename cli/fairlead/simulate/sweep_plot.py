"""A sweep as an SVG: mean TTFT, p99 TTFT and goodput of each policy over the offered load."""

import math
from html import escape

from fairlead.simulate.plot import COLORS
from fairlead.simulate.report import Cell, average

_WIDTH, _HEIGHT, _TOP, _BOTTOM = 1560, 480, 64, 56
_PANELS = {"ttft_mean": (60, 400), "ttft_p99": (580, 920), "goodput": (1100, 1440)}  # left and right edges; the names are to the right
_TITLES = {"ttft_mean": "mean TTFT, seconds", "ttft_p99": "p99 TTFT, seconds", "goodput": "requests within their bounds per second"}


def draw_sweep(cells: list[Cell], title: str) -> str:
    """Return the document: mean and p99 TTFT, and goodput, of each policy over the offered load. All are logarithmic."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/><text x="60" y="22" font-size="15">{escape(title)}</text>',
    ]
    for figure, (left, right) in _PANELS.items():
        parts += _panel(cells, figure, left, right)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(cells: list[Cell], figure: str, left: int, right: int) -> list[str]:
    curves = {policy: [max(0.01, average(cell.runs[policy])[figure]) for cell in cells] for policy in cells[0].runs}
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))
    loads = [cell.load for cell in cells]
    first, span = min(loads), max(loads) - min(loads) or 1.0

    def x(load: float) -> float:
        return left + (load - first) / span * (right - left)

    def y(seconds: float) -> float:
        return _HEIGHT - _BOTTOM - math.log(seconds / low) / math.log(max(high / low, 1.1)) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{left}" y="46">{_TITLES[figure]}, over the offered load (1: all that pods can do)</text>']
    for seconds in (digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 5)):
        if low <= seconds <= high:
            parts.append(f'<line x1="{left}" x2="{right}" y1="{y(seconds):.1f}" y2="{y(seconds):.1f}" stroke="#e3e6ea"/>')
            parts.append(f'<text x="{left - 8}" y="{y(seconds) + 4:.1f}" text-anchor="end">{seconds:g}</text>')
    parts += [f'<text x="{x(load):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{load:.2f}</text>' for load in loads]
    labels = _spread({policy: y(curve[-1]) for policy, curve in curves.items()})
    for (policy, curve), color in zip(curves.items(), COLORS * 2, strict=False):
        points = " ".join(f"{x(load):.1f},{y(seconds):.1f}" for load, seconds in zip(loads, curve, strict=True))
        width = 3 if policy == "fairlead" else 1.6
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"/>')
        parts.append(f'<text x="{right + 8}" y="{labels[policy] + 4:.1f}" fill="{color}">{escape(policy)}</text>')
    return parts


def _spread(places: dict[str, float]) -> dict[str, float]:
    """Move labels down until each is 14 pixels below the one above it."""
    moved: dict[str, float] = {}
    for name, place in sorted(places.items(), key=lambda each: each[1]):
        moved[name] = max(place, max(moved.values()) + 14) if moved else place
    return moved

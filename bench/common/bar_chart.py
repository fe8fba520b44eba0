"""Bar charts as SVG without a plotting library: one panel per figure, one bar per side."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLOURS = ("#8a8f98", "#5b8fd6", "#3fae8f", "#e0853a", "#a46bd1")
WIDTH, HEIGHT, GAP, TOP, BOTTOM = 170, 150, 24, 64, 40


@dataclass(frozen=True)
class Panel:
    figure: str
    title: str
    note: str
    scale: float = 1.0


def draw(title: str, panels: list[Panel], table: Mapping[str, Mapping[str, float]], to: Path) -> None:
    """Write the chart to `to`. `table`: figures by side. Each panel has its own scale, from zero."""
    parts = [f'<text x="{GAP}" y="20" font-size="13" font-weight="600">{escape(title)}</text>']
    for number, panel in enumerate(panels):
        parts += _panel(GAP + number * (WIDTH + GAP), panel, {side: row[panel.figure] * panel.scale for side, row in table.items()})
    for number, side in enumerate(table):
        x, y = GAP + number * WIDTH, TOP + HEIGHT + BOTTOM - 8
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[number]}"/>')
        parts.append(f'<text x="{x + 15}" y="{y}">{escape(side)}</text>')
    wide, high = GAP + len(panels) * (WIDTH + GAP), TOP + HEIGHT + BOTTOM
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="11" fill="#333">'
    to.write_text("\n".join([head, f'<rect width="{wide}" height="{high}" fill="#fff"/>', *parts, "</svg>"]) + "\n", encoding="utf-8")


def _panel(left: int, panel: Panel, values: dict[str, float]) -> list[str]:
    most = max(values.values()) or 1.0
    wide = WIDTH / len(values)
    parts = [f'<text x="{left}" y="{TOP - 22}" font-weight="600">{escape(panel.title)}</text>']
    parts.append(f'<text x="{left}" y="{TOP - 9}" fill="#888" font-size="10">{escape(panel.note)}</text>')
    for number, value in enumerate(values.values()):
        high = (HEIGHT - 16) * value / most
        x, y = left + number * wide, TOP + HEIGHT - high
        parts.append(f'<rect x="{x + 3:.1f}" y="{y:.1f}" width="{wide - 6:.1f}" height="{max(high, 0.5):.1f}" fill="{COLOURS[number]}"/>')
        parts.append(f'<text x="{x + wide / 2:.1f}" y="{y - 4:.1f}" text-anchor="middle">{value:.3g}</text>')
    parts.append(f'<line x1="{left}" y1="{TOP + HEIGHT}" x2="{left + WIDTH}" y2="{TOP + HEIGHT}" stroke="#999"/>')
    return parts

"""Line charts as SVG, for a page that loads nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 280, 90, 12, 10, 50
MOST_POINTS = 1500
"""Of a line: more are thinned out, for a chart has fewer columns."""
MOST_VALUES = 100
"""Of a line that are shown where the pointer is."""
_SMALLEST = 1e-100
"""What is closer than that lies at one place: of smaller numbers there are no logarithms of parts."""


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """A line of a chart. points: (step, value) in the order of steps. kind: "faint", below the others, or "dots"."""

    points: Sequence[tuple[float, float]]
    color: str
    name: str = ""
    kind: str = "line"


class Mark(NamedTuple):
    """A step of a chart that is marked with a dotted upright line, and what it says beside it."""

    step: float
    text: str
    color: str


def chart(title: str, lines: Sequence[ChartLine], *, axis: str = "step", marks: Sequence[Mark] = ()) -> str:
    """Return a chart as an SVG element with titled axes, grid, and values as tooltips; "" for no points. axis: what the
    horizontal axis counts."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    x_low, x_high = _span([x for x, _ in points])
    y_low, y_high = _span([y for _, y in points], margin=0.04)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

    label = escape(title)
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}"><title>{label}</title>']
    for y in ticks(y_low, y_high):
        _, down = place(x_low, y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down}" y2="{down}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 4}" text-anchor="end">{number_text(y)}</text>')
    for x in ticks(x_low, x_high):
        across, _ = place(x, y_low)
        parts.append(f'<line class="grid" x1="{across}" x2="{across}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number_text(x)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(axis)}</text>')
    upright = f'transform="rotate(-90 14 {middle})"'
    parts.append(f'<text x="14" y="{middle}" text-anchor="middle" {upright}>{label}</text>')
    for mark in marks:
        across, _ = place(mark.step, y_low)
        ends = f'x1="{across}" x2="{across}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
        parts.append(f'<line class="mark" {ends} stroke="{mark.color}" stroke-dasharray="2 3"/>')
        parts.append(f'<text x="{across + 4}" y="{TOP + 12}">{escape(mark.text)}</text>')
    for line in sorted(lines, key=lambda line: line.kind != "faint"):
        parts.append(_drawn(line, [place(*point) for point in thinned(line.points)]))
    for line in (line for line in lines if line.kind != "faint"):  # above all lines: these would hide them
        for point in line.points if line.kind == "dots" else spread(line.points):
            across, down = place(*point)
            told = escape(f"{line.name}, {axis} {number_text(point[0])}: {point[1]:.5g}")
            shape = f'r="3" fill="{line.color}"' if line.kind == "dots" else f'class="value" r="5" fill="{line.color}"'
            parts.append(f'<circle cx="{across}" cy="{down}" {shape}><title>{told}</title></circle>')
    return "".join(parts) + "</svg>"


def _drawn(line: ChartLine, places: list[tuple[float, float]]) -> str:
    style = {"faint": 'stroke-width="0.7" opacity="0.3"', "dots": 'stroke-width="1.2" stroke-dasharray="5 3"'}
    path = " ".join(f"{across},{down}" for across, down in places)
    how = style.get(line.kind, 'stroke-width="1.8"')
    return f'<polyline points="{path}" fill="none" stroke="{line.color}" {how}/>'


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most about MOST_POINTS of the points: of equal spans the lowest and the highest, in order."""
    if len(points) <= MOST_POINTS:
        return list(points)
    span, found = math.ceil(2 * len(points) / MOST_POINTS), []
    for begin in range(0, len(points), span):
        part = points[begin : begin + span]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        found += sorted(ends)
    return found


def spread(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most about MOST_VALUES of the points, evenly, with the last one."""
    every = math.ceil(len(points) / MOST_VALUES)
    return [point for i, point in enumerate(points) if i % every == 0 or i == len(points) - 1]


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round numbers between two: multiples of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10((high - low) / most))
    step = next(power * k for k in (1, 2, 5, 10, 20) if (high - low) / (power * k) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def number_text(value: float) -> str:
    """Return a number as an axis has it."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.6g}"
    return f"{value:.3g}"


def _span(values: Sequence[float], margin: float = 0.0) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), _SMALLEST):  # a flat line lies in the middle
        room = 0.5 * abs(low) if abs(low) > _SMALLEST else 0.5
        return low - room, high + room
    return low - margin * (high - low), high + margin * (high - low)

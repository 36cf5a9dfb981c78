"""Lines and bars as SVG, without a library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

__all__ = ["Panel", "svg"]

COLOURS = ("#2a7f62", "#c2701c", "#4b6cb7", "#8a8f98", "#a3456b", "#6f5aa8", "#b9a27c", "#3b8ea5")
WIDTH, HEIGHT = 360, 240  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 52, 24, 28, 44
COLUMNS = 3
LINE = 14  # pixels of a line of text


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Attributes:
        lines: series -> points. x is a number or a name; y starts at 0. Numbers have a logarithmic
            scale if they are above 0 and the largest is at least 8 times the smallest.
        dashed: series that are not measured: the paper's, and theory.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[Any, float]]]
    dashed: frozenset[str] = frozenset()


def svg(panels: Sequence[Panel]) -> str:
    """All panels, with one legend below."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    dashed = frozenset[str]().union(*(panel.dashed for panel in panels))
    columns = max(1, min(COLUMNS, len(panels)))
    rows = -(-len(panels) // columns)
    width, bottom = columns * WIDTH, rows * HEIGHT
    parts = [
        f'<g transform="translate({i % columns * WIDTH} {i // columns * HEIGHT})">'
        f"{_panel(panel, colours)}</g>"
        for i, panel in enumerate(panels)
    ]
    legend = [
        f'<line x1="{LEFT}" x2="{LEFT + 24}" y1="{y - 4}" y2="{y - 4}" stroke="{colours[name]}" '
        f'stroke-width="2"{_dash(name in dashed)}/>{_text(LEFT + 30, y, name)}'
        for i, name in enumerate(names)
        for y in [bottom + LINE * (i + 1)]
    ]
    height = bottom + LINE * (len(names) + 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11">'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(parts + legend)}</svg>\n'
    )


def _panel(panel: Panel, colours: Mapping[str, str]) -> str:
    points = [point for line in panel.lines.values() for point in line]
    axis = _Axis.of([x for x, _ in points])
    step = _round_step(max((y for _, y in points), default=1.0))
    top = step * max(1, math.ceil(max((y for _, y in points), default=1.0) / step))
    height = HEIGHT - TOP - BOTTOM

    def place(x: Any, y: float) -> tuple[float, float]:
        return axis.place(x), TOP + height * (1 - y / top)

    parts = [_text(LEFT, 16, panel.title, weight="bold"), _ticks(axis, step, top, place)]
    parts.append(_text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 8, panel.x, anchor="middle"))
    parts.append(_text(WIDTH - RIGHT, 16, panel.y, anchor="end"))
    for name, line in panel.lines.items():
        at = [place(x, y) for x, y in sorted(line, key=lambda p: axis.place(p[0]))]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        colour, dash = colours[name], _dash(name in panel.dashed)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>'
        )
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>' for x, y in at]
    return "".join(parts)


@dataclass(frozen=True)
class _Axis:
    """Places of x values: numbers by value or logarithm, names side by side."""

    values: list[Any]
    log: bool

    @staticmethod
    def of(values: Sequence[Any]) -> _Axis:
        found = list(dict.fromkeys(values))
        if not all(isinstance(value, (int, float)) for value in found):
            return _Axis([str(value) for value in found], False)
        found.sort()
        return _Axis(found, bool(found) and found[0] > 0 and found[-1] >= 8 * found[0])

    def place(self, value: Any) -> float:
        inner = WIDTH - LEFT - RIGHT
        if not self.values:
            return LEFT
        if isinstance(self.values[0], str):
            return LEFT + inner * (self.values.index(str(value)) + 0.5) / len(self.values)
        low, high, x = (self._scale(each) for each in (self.values[0], self.values[-1], value))
        return LEFT + inner * ((x - low) / (high - low) if high > low else 0.5)

    def _scale(self, value: float) -> float:
        return math.log(value) if self.log else float(value)


def _ticks(axis: _Axis, step: float, top: float, place: Any) -> str:
    parts = []
    for i in range(round(top / step) + 1):
        _, y = place(axis.values[0], i * step) if axis.values else (0, TOP)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            + _text(LEFT - 4, y + 4, f"{i * step:g}", anchor="end")
        )
    last = -math.inf
    for value in axis.values:
        x = axis.place(value)
        label = value if isinstance(value, str) else f"{value:g}"
        if x - last >= 6 * len(label) + 6:
            parts.append(_text(x, HEIGHT - BOTTOM + 16, label, anchor="middle"))
            last = x
    return "".join(parts)


def _round_step(most: float) -> float:
    """1, 2 or 5 times a power of ten: about five of them reach `most`."""
    rough = (most or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _dash(dashed: bool) -> str:
    return ' stroke-dasharray="5 3"' if dashed else ""


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )

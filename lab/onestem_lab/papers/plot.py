"""Panels of lines, for the papers' tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from onestem_lab.plots import svg_text

__all__ = ["Panel", "svg"]

COLUMNS = 3
WIDTH, HEIGHT, LINE = 3.8, 2.6, 0.16  # inches: of a panel, and of a line of the legend
TICKS = 8


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
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    columns = max(1, min(COLUMNS, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    size = (columns * WIDTH, rows * HEIGHT + LINE * (len(names) + 1))
    with matplotlib.rc_context({"text.parse_math": False, "font.size": 8}):
        figure = Figure(figsize=size, layout="constrained")
        all_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes in all_axes[len(panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(all_axes, panels):
            _draw(axes, panel, colours)
        drawn = {line.get_label(): line for axes in all_axes for line in axes.get_lines()}
        figure.legend(drawn.values(), list(drawn), loc="outside lower left", frameon=False, ncols=1)
        return svg_text(figure)


def _draw(axes: Axes, panel: Panel, colours: Mapping[str, str]) -> None:
    values = list(dict.fromkeys(x for line in panel.lines.values() for x, _ in line))
    is_number = all(isinstance(value, (int, float)) for value in values)
    places = {x: x for x in sorted(values)} if is_number else {x: i for i, x in enumerate(values)}
    if is_number and values and min(values) > 0 and max(values) >= 8 * min(values):
        axes.set_xscale("log")
    for name, line in panel.lines.items():
        at = sorted((places[x], y) for x, y in line)
        style = "--" if name in panel.dashed else "-"
        axes.plot(*zip(*at), style, marker="o", ms=3, lw=1.2, color=colours[name], label=name)
    shown = list(places)[:: -(-len(places) // TICKS) or 1]
    labels = [f"{x:g}" if is_number else str(x) for x in shown]
    axes.set_xticks([places[x] for x in shown], labels)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#ddd")
    axes.set_title(panel.title, loc="left", fontweight="bold", fontsize=8)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.spines[["top", "right"]].set_visible(False)

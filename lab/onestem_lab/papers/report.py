"""A result as a picture, and results as one page of HTML that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from onestem_lab.papers.experiment import THEORY, Experiment
from onestem_lab.papers.plot import Panel, svg
from onestem_lab.papers.table import table_of

__all__ = ["html_of", "picture_of"]

STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:1120px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:2px 10px;text-align:left;"
    "border-bottom:1px solid #ddd}svg{max-width:100%;height:auto}code{font-size:13px}"
)


def picture_of(experiment: Experiment, result: Mapping[str, Any]) -> str:
    """SVG: a line for each series, the paper's dashed. The x axis is the setting across the table,
    or else the last name of the places. Each value of the other settings has a panel."""
    names = list(result["cells"][0]["at"])  # cells with other names are not drawn
    x_name = experiment.across or names[-1]
    drawn: dict[str, dict[str, list[tuple[Any, float]]]] = {}
    dashed = set()
    for whose, mark in (("cells", ""), ("published", "paper: ")):
        for cell in result[whose]:
            if set(cell["at"]) != set(names) or not _drawn(experiment, cell):
                continue
            at = dict(cell["at"])
            x = at.pop(x_name)
            title = ", ".join(f"{name} {value}" for name, value in at.items())
            name = mark + cell["series"]
            drawn.setdefault(title, {}).setdefault(name, []).append((x, cell["value"]))
            if mark or cell["series"] == THEORY:
                dashed.add(name)
    unit = "ratio" if experiment.plot_ratio else experiment.unit
    panels = [
        Panel(title, x_name, unit, lines, frozenset(dashed & set(lines)))
        for title, lines in drawn.items()
    ]
    return svg(panels)


def _drawn(experiment: Experiment, cell: Mapping[str, Any]) -> bool:
    ratio = " : " in cell["series"] or cell["series"] == THEORY
    return cell["value"] is not None and ratio == experiment.plot_ratio


def html_of(results: Sequence[tuple[Experiment, Mapping[str, Any]]]) -> str:
    """One page: for each result its claim, table, picture and command."""
    links = "".join(
        f'<li><a href="#{e.name}">{escape(e.name)}</a> {escape(e.title)}</li>' for e, _ in results
    )
    sections = "".join(_section(*each) for each in results)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Onestem: the papers</title>"
        f"<style>{STYLE}</style><h1>Tables and figures of the papers</h1><ul>{links}</ul>"
        f"{sections}</html>\n"
    )


def _section(experiment: Experiment, result: Mapping[str, Any]) -> str:
    table = table_of(experiment, result)
    body = "".join(_row(row, "td") for row in table.rows)
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    return (
        f'<h2 id="{experiment.name}">{escape(experiment.name)}: {escape(experiment.title)}</h2>'
        f"<p>{escape(experiment.source)}</p>"
        f"<table>{_row(table.header, 'th')}{body}</table>{notes}{picture_of(experiment, result)}"
        f"<p>{escape(result['device'])}, {result['date']}: "
        f"<code>{escape(result['command'])}</code></p>"
    )


def _row(cells: Iterable[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

"""Pictures whose bytes depend on what they show alone: no date, no random ids."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

__all__ = ["save", "svg_text"]

# Any: matplotlib declares each name, in some versions.
SAME: dict[Any, Any] = {"svg.hashsalt": "onestem"}


def save(figure: Figure, out: Path) -> None:
    """Write a figure in the form that the file's name has (SVG, PNG)."""
    with matplotlib.rc_context(SAME):
        figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)


def svg_text(figure: Figure) -> str:
    """The figure as an `<svg>` element, to stand alone or in a page. Its letters are text."""
    written = StringIO()
    with matplotlib.rc_context({**SAME, "svg.fonttype": "none"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()
    return text[text.index("<svg") :]

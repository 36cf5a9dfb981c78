"""Writes the report of a plan."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onestem import __version__
from onestem.errors import ConfigError, JobError
from onestem.files import check_place, write_whole
from onestem.report.tree import DrawnTree

FOLDER = Path(__file__).parent
MOST_NODES = 8000
MOST_BYTES = 900_000
MODES = {
    "off": "without sharing",
    "storage": "stored once, read by each",
    "full": "shared",
}


@dataclass(frozen=True)
class Price:
    """Price of an hour, as `$2.50`, `2.50 EUR` or a bare number."""

    per_hour: float
    before: str = ""
    after: str = ""

    @staticmethod
    def read(text: str) -> Price:
        """Parse a price; raises `ConfigError` for any other text."""
        found = re.fullmatch(
            r"\s*([^\d\s.,+-]{0,4})\s*(\d{1,9}(?:\.\d{1,9})?)(\s*[^\d\s.,+-]{0,4})\s*", text
        )
        if found is None:
            raise ConfigError(
                f"price_per_hour is {text!r}, expected a price like 2.50, $2.50 or 2.50 EUR"
            )
        return Price(float(found[2]), found[1], found[3])

    def of(self, seconds: float) -> float:
        """Cost of `seconds`."""
        return self.per_hour * seconds / 3600

    def text(self, amount: float) -> str:
        """An amount in the price's currency."""
        digits = 2 if amount >= 0.1 or amount == 0 else 4
        return f"{self.before}{amount:,.{digits}f}{self.after}"

    def __str__(self) -> str:
        return self.text(self.per_hour)


def check_page(path: Path, source: Path) -> None:
    """Raise `JobError` for a path where no page can be written, before anything is computed."""
    other = "another file for --html"
    check_place(path, other)
    if path.exists() and os.path.samefile(path, source):
        raise JobError(f"{path} is the input: choose {other}")


def write_page(
    path: Path,
    report: dict[str, Any],
    draw: Callable[[int], dict[str, DrawnTree]],
    *,
    title: str,
    model: str,
    price: Price | None,
) -> None:
    """Write the report of a plan, less than a megabyte.

    Args:
        report: as `onestem.jobs.plan_file` returns it.
        draw: maximum number of nodes -> trees by name.
        title: the input's name.
        model: the model's name.
    """
    most = MOST_NODES
    while len(page := _page(report, draw(most), title, model, price)) > MOST_BYTES and most > 1:
        most = most * 2 // 3
    path = Path(os.path.realpath(path))  # a symbolic link stays
    try:
        write_whole(path, page)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}") from error


def _page(
    report: dict[str, Any], trees: dict[str, DrawnTree], title: str, model: str, price: Price | None
) -> bytes:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    style, script = ((FOLDER / name).read_text("utf-8") for name in ("page.css", "page.js"))
    page = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters |= {
        "count": _count,
        "seconds": _seconds,
        "memory": _memory,
        "percent": _percent,
    }
    text = page.get_template("page.html").render(
        report=report,
        trees=trees,
        title=title,
        model=model,
        price=price,
        modes=MODES,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=_in_script({name: tree.nodes for name, tree in trees.items()}),
    )
    return text.encode("utf-8", "replace")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _in_script(value: Any) -> str:
    """JSON in which no text can end the script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _count(number: float) -> str:
    return f"{number:,.0f}".replace(",", "\u202f")


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _memory(num_bytes: float) -> str:
    unit, size = ("GiB", 2**30) if num_bytes >= 2**30 else ("MiB", 2**20)
    return f"{num_bytes / size:.1f} {unit}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"

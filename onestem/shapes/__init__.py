"""Shapes: sizes of models, without their weights.

Each folder here is a shape with a `config.json`: sizes, positions and dtype of a published one, or
of a small model for benchmarks on a CPU (`0.1b`, `0.5b`, `nothing`). Special tokens are left out:
answers of random weights end at `max_tokens` alone. `shape:NAME` stands for it wherever a model is
named.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from onestem.errors import ConfigError

HERE = Path(__file__).parent
PREFIX = "shape:"


def shape_names() -> list[str]:
    """All shapes, sorted."""
    return sorted(config.parent.name for config in HERE.glob("*/config.json"))


def is_shape(model: str | os.PathLike[str]) -> bool:
    """Whether a model is named as a shape, known or not."""
    return str(model).startswith(PREFIX)


def find_shape(name: str) -> Path:
    """The directory of a shape; `name` with `shape:` before it or without.

    Raises:
        ConfigError: there is none; it names those that may be meant.
    """
    name = name.removeprefix(PREFIX)
    names = shape_names()
    if name in names:
        return HERE / name
    near = difflib.get_close_matches(name.lower(), names, 1, 0.8)
    near = near or [one for one in names if name and name.lower() in one]
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(names)}"
    raise ConfigError(f"there is no shape {name!r}: {hint}")

"""Cases that are left to `make soak`: they take long, and rarely find what others do not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

__all__ = ["one_in", "seeds", "soaked"]


def soaked(*values: Any) -> Any:
    """A case of `pytest.mark.parametrize` that `make soak` runs."""
    return pytest.param(*values, marks=pytest.mark.soak)


def seeds(few: int, count: int) -> list[Any]:
    """The seeds from 0 to `count` - 1, of which the first `few` always run."""
    return [*range(few), *map(soaked, range(few, count))]


def one_in(count: int, *axes: Sequence[Any]) -> list[Any]:
    """All combinations of values, of which one in `count` always runs: each value of an axis with
    each of another, where a third axis has `count` values or more."""
    cases = []
    for places in product(*(range(len(axis)) for axis in axes)):
        case = tuple(axis[place] for axis, place in zip(axes, places, strict=True))
        cases.append(soaked(*case) if sum(places) % count else case)
    return cases

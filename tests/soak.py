"""Cases that are left to `make soak`: they take long, and rarely find what others do not."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["seeds", "soaked"]


def soaked(*values: Any) -> Any:
    """A case of `pytest.mark.parametrize` that `make soak` runs."""
    return pytest.param(*values, marks=pytest.mark.soak)


def seeds(few: int, count: int) -> list[Any]:
    """The seeds from 0 to `count` - 1, of which the first `few` always run."""
    return [*range(few), *map(soaked, range(few, count))]

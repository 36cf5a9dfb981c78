"""Arrays of one length, a column each, that grow and shrink together."""

from __future__ import annotations

from typing import Self

import numpy as np

__all__ = ["Columns"]


class Columns:
    """int64 arrays by name. A subclass names them in `NAMES`, and declares each as an attribute.

    They are arrays of their own and not fields of one: most work of a step reads or writes a single
    column, and strided ones take several times as long.
    """

    NAMES: tuple[str, ...] = ()

    def __init__(self, length: int = 0) -> None:
        for name in self.NAMES:
            setattr(self, name, np.zeros(length, np.int64))

    def __len__(self) -> int:
        return len(getattr(self, self.NAMES[0]))

    def lengthen(self, count: int) -> None:
        """So many zeros more, in place."""
        for name in self.NAMES:
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(count, np.int64))))

    def kept(self, rows: np.ndarray) -> Self:
        """Those of bool `rows`."""
        return self._each({name: getattr(self, name)[rows] for name in self.NAMES})

    def inserted(self, at: int, other: Self) -> Self:
        """With all of another's before row `at`."""
        return self._each(
            {
                name: np.concatenate((mine[:at], getattr(other, name), mine[at:]))
                for name in self.NAMES
                for mine in (getattr(self, name),)
            }
        )

    def _each(self, arrays: dict[str, np.ndarray]) -> Self:
        made = type(self)()
        for name, array in arrays.items():
            setattr(made, name, array)
        return made

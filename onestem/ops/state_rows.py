"""Which rows of a step continue which recurrent state. Without torch, for the policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onestem.arrays import before, ragged
from onestem.errors import ConfigError

# Rows that are computed as products of matrices; counted from position 0 of a sequence.
CHUNK = 64
# A part of up to as many rows is computed row by row.
FEW_ROWS = 8


@dataclass(frozen=True, eq=False)
class StateRows:
    """Which rows of a step continue which state: parts of consecutive rows of one sequence each.
    All arrays are int32 `[num_parts]`.

    Attributes:
        first: first row.
        count: rows; 0: the part is padding.
        position: of its first row in the sequence.
        source: slot of the state before the part; -1: none, it is zeros.
        target: slot of the state after its last row; may be the part's own source.
    """

    first: np.ndarray
    count: np.ndarray
    position: np.ndarray
    source: np.ndarray
    target: np.ndarray

    def table(self) -> np.ndarray:
        """All as int32 `[num_parts, 5]`."""
        columns = (self.first, self.count, self.position, self.source, self.target)
        return np.stack(columns, 1).astype(np.int32)

    def chunks(self) -> tuple[np.ndarray, np.ndarray]:
        """The chunks of parts with more than `FEW_ROWS` rows, int32 `[num_chunks, 2]`: part, and
        first row, which lies before the part where it begins within a chunk. And those parts,
        int32 `[.., 3]`: index, first chunk, number of chunks."""
        parts = np.flatnonzero(self.count > FEW_ROWS)
        lead = self.position[parts] % CHUNK
        count = -(-(lead + self.count[parts]) // CHUNK)
        at, index = before(count), ragged(np.zeros_like(count), count)
        row = np.repeat(self.first[parts] - lead, count) + index * CHUNK
        table = np.stack((np.repeat(parts, count), row), 1)
        return table.astype(np.int32), np.stack((parts, at, count), 1).astype(np.int32)

    def check(self, num_rows: int, num_slots: int) -> None:
        """Raise `ConfigError` unless rows and slots are there, no two parts share a row or write
        one slot, and none reads what another writes."""
        used = self.count > 0
        first, count, source, target = (
            x[used].astype(np.int64) for x in (self.first, self.count, self.source, self.target)
        )
        order = np.argsort(first)
        ends = (first + count)[order]
        apart = (first[order] >= np.concatenate(([0], ends))[:-1]).all()
        _require(bool(apart and (ends <= num_rows).all()), f"rows overlap or leave {num_rows}")
        inside = (source >= -1) & (source < num_slots) & (target >= 0) & (target < num_slots)
        _require(bool(inside.all()), f"a slot is not among {num_slots}")
        _require(len(np.unique(target)) == len(target), "two parts write one slot")
        others = source[source != target]
        _require(not np.isin(others, target).any(), "a part reads a slot that another one writes")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(f"rows of states: {message}")

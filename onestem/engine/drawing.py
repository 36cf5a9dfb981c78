"""Sampling at step after step without the host between."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from onestem.engine.sampled import Pending
from onestem.engine.sampler import Sampler, Step
from onestem.engine.sampling_row import SamplingRow
from onestem.ops.sampling import IDLE, ROW

__all__ = ["Drawing"]


class Drawing:
    """Samples rows at step after step, without waiting for the device.

    Args:
        rows: as they are before the first step; each step they are a token further.
    """

    def __init__(self, sampler: Sampler, rows: Sequence[SamplingRow]) -> None:
        self._sampler = sampler
        self._rows: list[SamplingRow | None] = []
        self._records = np.zeros(0, ROW)
        self._step: Step | None = None
        self.put(range(len(rows)), rows)

    def put(self, places: Sequence[int], rows: Sequence[SamplingRow]) -> None:
        """Rows of the logits that are sampled like these from now on."""
        self._settle()
        missing = max(places, default=-1) + 1 - len(self._rows)
        if missing > 0:
            self._rows.extend([None] * missing)
            self._records = np.concatenate((self._records, np.full(missing, IDLE)))
        for place, row in zip(places, rows, strict=True):
            self._rows[place] = row
        if rows:
            self._records[list(places)] = self._sampler.records(rows)

    def leave(self, places: Sequence[int]) -> None:
        """Rows of the logits that nobody reads until they are `put` again."""
        self._settle()
        for place in places:
            self._rows[place] = None
        self._records[places] = IDLE

    def _settle(self) -> None:
        """Before the rows change: how many tokens each has sampled."""
        if self._step is not None:
            self._records["token"][: len(self._step.table)] += np.uint32(self._step.table.steps)
            self._step = None

    def start(self, logits: Tensor) -> Pending:
        """Sample the next token of each row of `logits` float32 `[n, vocab]`."""
        if self._step is None or len(self._step.table) != len(logits):
            self._settle()
            self._step = Step(self._records[: len(logits)].copy(), self._row_at, self._sampler)
        return self._sampler.launch(logits, self._step)

    def _row_at(self, place: int) -> SamplingRow:
        row = self._rows[place]
        assert row is not None
        row.token_index = int(self._records["token"][place])
        return row

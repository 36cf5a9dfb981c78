"""The runner of a CPU: decodes of few rows are one call of C++, where all of them is C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onestem.engine.step.inputs import StepInputs
from onestem.engine.step.runner import DecoderRows, Prepared, Runner
from onestem.ops import Angles
from onestem.ops.cpu.recorded import Recorded

# With more, Python takes a small part of a step, and what is kept of all layers much memory.
MOST_ROWS = 8
NEW = object()


class CpuRunner(Runner):
    """A `Runner` whose attention is that of `ops.cpu`.

    Attributes:
        recorded: steps by their number of rows and of threads; None: they cannot be run again.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.recorded: dict[tuple[int, int], Recorded | None] = {}

    def release_pages(self) -> None:
        """See `Runner`. What is recorded has addresses."""
        self.recorded.clear()
        super().release_pages()

    def release_weights(self, *, keep: bool) -> None:
        """See `Runner`."""
        self.recorded.clear()
        super().release_weights(keep=keep)

    def hidden(self, inputs: StepInputs, prepared: Prepared, rows: DecoderRows) -> Tensor:
        """See `Runner`."""
        count = len(rows.ids)
        few = count == len(inputs.positions) <= MOST_ROWS and not len(inputs.score_rows)
        plain = rows.read is None and rows.states is None and rows.watched is None
        alone = bool(prepared) and self.decoder.ranks.size == 1
        key = count, torch.get_num_threads()
        known = self.recorded.get(key, NEW)
        if not (few and plain and alone and known) or self.queries(inputs) is not None:
            return super().hidden(inputs, prepared, rows)
        given = self.decoder.inputs(rows.ids, rows.positions)
        kinds = list({id(one): one for one in given.angles}.values())
        tensors = [given.hidden, rows.slots, *(tensor for one in kinds for tensor in one)]
        plans: list[Any] = [prepared[window] for window in sorted(prepared, key=str)]
        if isinstance(known, Recorded):
            return known.run(tensors, plans, len(self.kv_pages[0][0]))

        def through(mine: Sequence[Tensor]) -> Tensor:
            hidden, slots, *parts = mine
            own = {id(one): Angles(*parts[2 * i : 2 * i + 2]) for i, one in enumerate(kinds)}
            angles = [own[id(one)] for one in given.angles]
            attend = self._attend(prepared, slots, count, None, None)
            return self.decoder.through(given._replace(hidden=hidden, angles=angles), attend)

        made = Recorded(tensors, plans, through)
        self.recorded[key] = made if made.works else None
        return made.found

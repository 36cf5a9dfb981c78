"""The runner of a CPU: decodes of few rows are one call of C++, where all of them is C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onestem.engine.step.choices import Watched
from onestem.engine.step.inputs import StepInputs
from onestem.engine.step.runner import Prepared, Runner
from onestem.models.decoder import StepRows
from onestem.models.delta import StatesOf
from onestem.ops import Angles
from onestem.ops.cpu.recorded import Recorded

# With more, Python takes a small part of a step, and what is kept of all layers much memory.
MOST_ROWS = 4
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

    def hidden(
        self,
        inputs: StepInputs,
        prepared: Prepared,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        read: Tensor | None,
        states: StatesOf | None,
        watched: Watched | None,
    ) -> Tensor:
        """See `Runner`."""
        few = len(ids) == len(inputs.positions) <= MOST_ROWS and not len(inputs.score_rows)
        plain = read is None and states is None and watched is None and bool(prepared)
        key, alone = (len(ids), torch.get_num_threads()), self.decoder.ranks.size == 1
        known = self.recorded.get(key, NEW)
        if not (few and plain and alone and known) or self.queries(inputs) is not None:
            others = read, states, watched
            return super().hidden(inputs, prepared, ids, positions, slots, *others)
        rows = self.decoder.inputs(ids, positions)
        of_layers = list({id(one): one for one in rows.angles}.values())
        kinds = [[one is kind for kind in of_layers].index(True) for one in rows.angles]
        tensors = [rows.hidden, slots, *(tensor for one in of_layers for tensor in one)]
        plans: list[Any] = [prepared[window] for window in sorted(prepared, key=str)]

        def through(mine: Sequence[Tensor]) -> Tensor:
            hidden, slots, *parts = mine
            made = [Angles(*parts[2 * i : 2 * i + 2]) for i in range(len(of_layers))]
            attend = self._attend(prepared, slots, len(ids), None, None)
            own = StepRows(hidden, [made[kind] for kind in kinds], rows.growth, rows.vectors)
            return self.decoder.through(own, attend)

        if isinstance(known, Recorded):
            return known.run(tensors, plans, len(self.kv_pages[0][0]))
        made = Recorded(tensors, plans, through)
        self.recorded[key] = made if made.works else None
        return made.found

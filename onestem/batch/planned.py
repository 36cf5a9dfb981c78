"""A job's lines in the order in which they run."""

from __future__ import annotations

import numpy as np

from onestem.batch.interface import Planner, SpooledPrompts
from onestem.batch.journal import Journal
from onestem.batch.spool import Spool
from onestem.planner import Planned, RunningOrder
from onestem.planner.sort import IntArray


class PlannedLines(Planned):
    """Some lines without a result, planned together with all that have one: these show how long
    answers are.

    Args:
        indices: `[num_lines_to_run]` int64, of the lines to run, ascending.
    """

    def __init__(self, spool: Spool, indices: IntArray, journal: Journal, planner: Planner) -> None:
        answered = journal.answered
        answered = answered[spool.is_request[answered]]
        self._lines = lines = np.union1d(indices, answered)
        plan = planner(SpooledPrompts(spool, lines), output_lengths=spool.output_lengths(lines))
        done = np.searchsorted(lines, answered)
        # Unknown lengths of answers are -1 in both.
        order = RunningOrder(plan, done, journal.output_tokens[answered])
        to_run = np.flatnonzero(~np.isin(plan.order, done))
        super().__init__(lambda place: spool.request(int(lines[place])), order, to_run)

    def note(self, index: int, output_tokens: int) -> None:
        """Note that a line is answered, and how many tokens were sampled."""
        self.order.note(int(np.searchsorted(self._lines, index)), output_tokens)

"""A job's lines in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from onestem.batch.interface import IntArray, Planner, SpooledPrompts
from onestem.batch.journal import Journal
from onestem.batch.spool import Spool
from onestem.planner import JobPlan, RunningOrder
from onestem.request import Request

__all__ = ["PlannedLines"]


class PlannedLines:
    """Some lines without a result, planned together with all that have one: these show how long
    answers are.

    Iterating makes requests when they are pulled, in an order that new answers may change.

    Args:
        indices: of the lines to run, ascending.

    Attributes:
        plan: of all these lines.
        order: in which those that have no result begin.
        positions: `[num_lines_to_run]` positions of the lines to run in the plan's order, rising.
    """

    def __init__(self, spool: Spool, indices: IntArray, journal: Journal, planner: Planner) -> None:
        answered = journal.answered
        answered = answered[spool.is_request[answered]]
        self._spool = spool
        self._lines = np.union1d(indices, answered)
        self.plan: JobPlan = planner(
            SpooledPrompts(spool, self._lines), output_lengths=spool.output_lengths(self._lines)
        )
        done = np.searchsorted(self._lines, answered)
        # Unknown lengths of answers are -1 in both.
        self.order = RunningOrder(self.plan, done, journal.output_tokens[answered])
        self.positions = np.flatnonzero(~np.isin(self.plan.order, done))

    def note(self, index: int, output_tokens: int) -> None:
        """Note that a line is answered, and how many tokens were sampled."""
        self.order.note(int(np.searchsorted(self._lines, index)), output_tokens)

    def __iter__(self) -> Iterator[Request]:
        return map(self._request, self.order)

    def request(self, position: int) -> Request:
        """The request at a position of the plan's order."""
        return self._request(int(self.plan.order[position]))

    def _request(self, place: int) -> Request:
        group = int(self.plan.group_of[place])
        prefix_tokens = self.plan.groups[group].prefix_tokens
        return self._spool.request(
            int(self._lines[place]),
            group=group if prefix_tokens else None,
            group_prefix_tokens=prefix_tokens,
            group_only=self.plan.group_only,
        )

"""The running sequences of one class: interactive requests, or jobs."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from onestem.engine.schedule.draft import StepDraft
from onestem.engine.schedule.throttle import JobShare
from onestem.engine.sequence import Sequence

# Steps in which jobs run beside interactive requests, and in which they pause.
MIXED_STEPS = 16
REFERENCE_STEPS = 6

_age = attrgetter("order")


@dataclass(kw_only=True, eq=False, repr=False)
class Lane:
    """Which sequences run, compute a prompt or decode, and how many may.

    Attributes:
        is_job: whether it is the jobs'.
        share: how many rows it has beside the lane before it; None: any.
        running: admitted sequences, the oldest first.
        prompts: those of them that do not decode yet, in the same order.
        standing: those that decode and have no row.
        rows: those that have one.
        limit: maximum rows; None: any.
    """

    is_job: bool
    share: JobShare | None = None
    running: list[Sequence] = field(default_factory=list)
    prompts: list[Sequence] = field(default_factory=list)
    standing: dict[Sequence, None] = field(default_factory=dict)
    rows: dict[Sequence, None] = field(default_factory=dict)
    limit: int | None = None
    _review_at: int = 0  # the step in which `limit` is set again

    @property
    def num_decoding(self) -> int:
        """Sequences whose prompt is computed."""
        return len(self.running) - len(self.prompts)

    @property
    def is_steady(self) -> bool:
        """Whether all its sequences decode, and go on to."""
        return not (self.prompts or self.standing)

    def add(self, sequence: Sequence, *, decodes: bool = False) -> None:
        """Add an admitted sequence. One that was preempted keeps its age, so that it is not the
        first to go again."""
        insort(self.running, sequence, key=_age)
        if not decodes:
            insort(self.prompts, sequence, key=_age)

    def remove(self, sequence: Sequence) -> None:
        """Remove one that is not admitted any more."""
        self.running.remove(sequence)
        if sequence in self.prompts:
            self.prompts.remove(sequence)
        self.standing.pop(sequence, None)
        self.rows.pop(sequence, None)

    def has_row(self, sequence: Sequence, draft: StepDraft) -> bool:
        """Whether a running sequence has rows in a step."""
        if sequence in self.prompts:
            return draft.has_chunk(sequence)
        return sequence not in self.standing or sequence in draft.changes.enter

    def review(self, step: int, decodes: int | None) -> None:
        """Set its limit again, now and then. `decodes`: sequences of the lane before it that
        decode; None: nobody is there."""
        if self.share is None or decodes is None:
            self.limit = None
        elif self.limit is None or step >= self._review_at:
            self.limit = self.share.rows(decodes)
            self._review_at = step + (MIXED_STEPS if self.limit else REFERENCE_STEPS)

    def choose_rows(self, draft: StepDraft) -> None:
        """Choose which sequences decode; only this method does."""
        changes = draft.changes
        if draft.only is not None:
            changes.leave += [sequence for sequence in self.rows if not draft.tries(sequence)]
            changes.enter += [sequence for sequence in self.standing if draft.tries(sequence)]
            return
        if self.limit is None:
            changes.enter += self.standing
            return
        free = self.limit - len(self.rows)
        if free < 0:
            changes.leave += sorted(self.rows, key=_age)[free:]
        changes.enter += sorted(self.standing, key=_age)[: max(0, free)]

    def bound_prompts(self, draft: StepDraft) -> None:
        """Leave its prompts what rows its limit has beside those that decode."""
        if self.limit is None:
            return
        entering = sum(sequence.is_job is self.is_job for sequence in draft.changes.enter)
        rows = len(self.rows) - len(draft.changes.leave) + entering
        draft.left = min(draft.left, self.limit - rows)

    def settle(self, draft: StepDraft) -> None:
        """Note which of its sequences have rows from this step on."""
        for sequence in draft.changes.enter:
            if sequence.is_job is self.is_job:
                self.standing.pop(sequence, None)
                self.rows[sequence] = None
        for sequence in draft.changes.leave:
            if sequence.is_job is self.is_job:
                self.rows.pop(sequence, None)
                if sequence.run is not None:
                    self.standing[sequence] = None

    def release_placeholders(self) -> None:
        """Give back what prompts in PML hold between two steps only."""
        for sequence in chain(self.prompts, self.standing):
            if sequence.modules is not None:
                sequence.modules.release_placeholders()

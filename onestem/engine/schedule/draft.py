"""A step while it is being decided."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onestem.cache import Run
from onestem.engine.sequence import Chunk, Sequence, StepChanges

if TYPE_CHECKING:
    from onestem.engine.schedule.states import States


@dataclass(kw_only=True, eq=False)
class StepDraft:
    """What a step changes, and what holds only while that is being decided; it ends with its step.

    Tokens of its chunks count as computed at once, since others may go on from them in the same
    step. `drop` takes that back.

    While a step is in flight nothing is preempted: it may free memory. A draft that lacks some
    `waits` instead. It takes no more rows, and is dropped; the next one comes after that step's
    results. (A value to hand up would be looked at in twenty places; this one is looked at where
    rows are added.)

    Attributes:
        may_preempt: whether nothing is in flight.
        only: no others have rows, or are admitted; None: all may.
        changes: what differs from the step before.
        left: rows that prompts may still have.
        waits: it lacks memory that may be freed by what is in flight.
        admits: new sequences may have rows, and not only those that run.
        opened: ids of the interactive requests that it has taken from the queue.
        handling: the sequence that is being scheduled, to which an error is attributed.
        num_forks: sequences that fork from running prompts; None: not counted.
        is_launched: its chunks have keys and values.
    """

    may_preempt: bool = True
    only: Container[Sequence] | None = None
    changes: StepChanges = field(default_factory=StepChanges)
    left: int = 0
    waits: bool = False
    admits: bool = True
    opened: list[str] = field(default_factory=list)
    handling: Sequence | None = None
    num_forks: int | None = None
    is_launched: bool = False
    _chunked: set[Sequence] = field(default_factory=set)

    @property
    def takes_rows(self) -> bool:
        """Whether it may have more rows of prompts."""
        return self.left > 0 and not self.waits

    def tries(self, sequence: Sequence) -> bool:
        """Whether a sequence may have rows."""
        return self.only is None or sequence in self.only

    def has_chunk(self, sequence: Sequence) -> bool:
        """Whether a sequence computes a part of its prompt."""
        return sequence in self._chunked

    def add_chunk(self, chunk: Chunk) -> Chunk:
        """Add a chunk, before its tokens count as computed: `drop` takes them back wherever
        scheduling is interrupted."""
        self.changes.chunks.append(chunk)
        self._chunked.add(chunk.sequence)
        return chunk

    def chunk_over(self, sequence: Sequence, at: int) -> Chunk | None:
        """The chunk of a sequence that has rows both before and after token `at`, if it has one."""
        if sequence not in self._chunked:
            return None
        theirs = (chunk for chunk in self.changes.chunks if chunk.sequence is sequence)
        return next((one for one in theirs if one.start < at < one.end), None)

    def writes(self, run: Run) -> bool:
        """Whether its rows write keys and values of a run."""
        theirs = (chunk for chunk in self.changes.chunks if chunk.sequence is run.owner)
        return any(chunk.fresh < run.end and chunk.end > run.start for chunk in theirs)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has lost its memory."""
        for some in (self.changes.enter, self.changes.leave):
            if sequence in some:
                some.remove(sequence)
        self.num_forks = None

    def drop(self, version: int, states: States | None) -> None:
        """Take back the chunks of a step that is not launched: their tokens have no KV. `version`:
        the tree's count of splits."""
        if self.is_launched:
            return
        for chunk in self.changes.chunks:
            if states is not None:
                states.take_back(chunk)
            if chunk.module is not None:
                chunk.module.computed = min(chunk.module.computed, chunk.start)
            elif chunk.sequence.run is not None:
                for run in chunk.sequence.path(version):
                    if run.start < chunk.end and run.end > chunk.fresh:
                        run.computed = min(run.computed, max(0, chunk.fresh - run.start))

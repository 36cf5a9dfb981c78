"""Which sequence is admitted next: sequences that wait for memory, then the queue."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from onestem.cache import PrefixCache
from onestem.engine.schedule.answers import AnswerMemory
from onestem.engine.schedule.draft import StepDraft
from onestem.engine.schedule.groups import PlannedGroups
from onestem.engine.schedule.queue import HybridQueue, RequestQueue
from onestem.engine.sequence import Sequence
from onestem.request import Request

if TYPE_CHECKING:
    from onestem.engine.schedule.admission import SequenceFactory

# Sequences that wait for host memory while requests after them are looked for that need none.
MOST_PARKED = 256
# Steps after which memory is looked for again for the first that waits.
SHORT_STEPS = 16


class SourceError(Exception):
    """A request could not be read from where it comes from; the cause says why."""


def _place(sequence: Sequence) -> tuple[bool, float]:
    """Sort key of waiting sequences: those never admitted last, as they came."""
    return sequence.is_job, sequence.order if sequence.order >= 0 else float("inf")


class WaitingLine:
    """Sequences that are opened and not (or no longer) admitted, in their order, and the queue.

    Attributes:
        queue: where new requests wait.
        groups: those of requests that wait or run.
    """

    def __init__(
        self,
        queue: RequestQueue,
        factory: SequenceFactory,
        answers: AnswerMemory,
        cache: PrefixCache,
    ) -> None:
        self.queue = queue
        self.groups = PlannedGroups(cache, self._group_open)
        self._factory = factory
        self._answers = answers
        self._sequences: deque[Sequence] = deque()
        self._short: tuple[object, int] | None = None  # see `note_short`

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def put(self, sequence: Sequence) -> None:
        """Let a sequence wait: jobs after interactive ones, never admitted after preempted ones."""
        insort(self._sequences, sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence."""
        self._sequences.remove(sequence)

    def peek(self) -> Request | None:
        """The next request of the queue.

        Raises:
            SourceError: it could not be read.
        """
        try:
            return self.queue.peek()
        except Exception as error:
            raise SourceError from error

    def peek_interactive(self) -> Request | None:
        """The next interactive request of the queue; None: there is none."""
        return self.queue.interactive.peek() if isinstance(self.queue, HybridQueue) else None

    @property
    def is_interactive(self) -> bool:
        """Whether an interactive request waits, which comes before jobs."""
        if self._sequences and not self._sequences[0].is_job:
            return True
        request = self.peek()
        return request is not None and request.priority != "job"

    def head(self) -> Sequence | Request | None:
        """The sequence or request that would be admitted next."""
        request, first = self.peek(), self._first()
        if first is not None and (request is None or request.priority == "job" or not first.is_job):
            return first
        return request if request is not None and self._passes(request) else None

    def is_next(self, *, jobs: bool) -> bool:
        """Whether the next to be admitted is of a class."""
        head = self.head()
        if isinstance(head, Sequence):
            return head.is_job is jobs
        return head is not None and (head.priority == "job") is jobs

    def note_short(self, step: int) -> None:
        """Note that memory is short for the first, in a step."""
        self._short = self.head(), step

    def is_short(self, step: int) -> bool:
        """Whether memory was short for the first a few steps ago, and none was freed since."""
        if self._short is None:
            return False
        head, since = self._short
        return head is self.head() and step < since + SHORT_STEPS

    def forget_short(self) -> None:
        """Memory was freed."""
        self._short = None

    def next(self, draft: StepDraft, *, jobs: bool) -> Sequence | None:
        """The first sequence, if it is of the class (jobs do not pass interactive requests); it
        stays until it is removed. A request is opened where it comes first."""
        if draft.only is not None:
            return next((s for s in self if draft.tries(s) and s.is_job is jobs), None)
        first = self._first()
        if first is None or (first.is_job and not jobs):
            request = self.peek()
            if (
                request is not None
                and (request.priority == "job") is jobs
                and self._passes(request)
            ):
                self._open(request, draft)
                first = self._first()
        return first if first is not None and first.is_job is jobs else None

    def _first(self) -> Sequence | None:
        """The first that waits for KV memory; those that wait for host memory hold up no others."""
        return self._answers.first_with_room(self._sequences)

    def _passes(self, request: Request) -> bool:
        """Whether a request may be opened while others wait for host memory: jobs, which wait
        after the interactive ones, keep none of these out."""
        parked = len(self) >= MOST_PARKED
        if parked and request.priority != "job":
            parked = not self._sequences[MOST_PARKED - 1].is_job
        return not parked or not self._answers.limit.bytes_of(request)

    def _open(self, request: Request, draft: StepDraft) -> None:
        if request.priority != "job":
            draft.opened.append(request.request_id)
        try:
            sequences = list(self._factory.open(request).sequences)
        except Exception as error:
            self.queue.pop()
            self._factory.refuse(request, error)
            return
        self.queue.pop()
        for sequence in sequences:
            self.put(sequence)
        self.groups.release_closed()

    def _group_open(self, group: int) -> bool:
        waiting = any(sequence.state.request.group == group for sequence in self._sequences)
        return waiting or self.queue.group_open(group)

"""The scheduler without a model: jobs whose tokens are numbers."""

from __future__ import annotations

from array import array

from onestem.cache import PagePool, PrefixCache
from onestem.engine.schedule.answers import AnswerLimit, AnswerMemory
from onestem.engine.schedule.draft import StepDraft
from onestem.engine.schedule.pins import PinnedPrefixes
from onestem.engine.schedule.queue import InteractiveQueue
from onestem.engine.schedule.scheduler import Scheduler
from onestem.engine.schedule.throttle import StepLimits
from onestem.engine.sequence import RequestState, Sequence
from onestem.request import Request, RequestMetrics

__all__ = ["Simulation"]


class Simulation:
    """Runs a job through the scheduler; each sampled token is a number that nobody else has."""

    def __init__(self, queue, *, kv_tokens: int, page_size: int = 16, share=True, **limits):
        pool = PagePool(kv_tokens // page_size, page_size)
        self.cache = PrefixCache(pool, enabled=share)
        nobody = InteractiveQueue(self.cache.tree, max_passed=0)
        pins = PinnedPrefixes(self.cache, nobody, max_model_len=1, bytes_per_token=1)
        steps = StepLimits(step_tokens=limits.pop("max_step_tokens", 2048))
        answers = AnswerMemory(AnswerLimit(most=0, max_model_len=1, kv_tokens=1))
        self.scheduler = Scheduler(
            self.cache, queue, self, pins, limits=steps, answers=answers, **limits
        )
        self.processed = self.logical = self.steps = 0
        self.rows: list[int] = []
        self.next_token = 10**6
        self.decoding: list[Sequence] = []
        self.order: list[str] = []
        self.most_running = 0

    def open(self, request: Request) -> RequestState:
        state = RequestState(request, 0, RequestMetrics())
        state.sequences = [Sequence(state, 0, array("i", request.prompt_token_ids))]
        self.logical += len(request.prompt_token_ids)
        self.order.append(request.request_id)
        return state

    @property
    def sequences(self) -> list[Sequence]:
        return [s for s in self.decoding if s.run is not None]

    def any_stays(self, leave: list[Sequence]) -> bool:
        return bool(self.sequences)

    def page_ends(self) -> list[Sequence]:
        return self.sequences

    def step(self) -> bool:
        self.draft = StepDraft()
        self.scheduler.decide(self.draft, self)
        assert not self.draft.waits
        changes = self.draft.changes
        rows = [*self.sequences, *changes.enter]
        chunks = changes.chunks
        if not rows and not chunks:
            return False
        self.steps += 1
        self.rows.append(len(rows) + sum(chunk.end - chunk.start for chunk in chunks))
        self.most_running = max(self.most_running, len(self.scheduler.running))
        for chunk in chunks:
            self.processed += max(0, min(chunk.end, chunk.sequence.num_prompt) - chunk.start)
        for sequence in [*rows, *(one for chunk in chunks for one in chunk.samples)]:
            self.next_token += 1
            sequence.extend([self.next_token])
            if self.is_done(sequence):
                sequence.finish_reason = "length"
                self.scheduler.room.finish(sequence)
        self.decoding = rows
        return True

    def is_done(self, sequence: Sequence) -> bool:
        return sequence.num_left == 0

    def run(self) -> float:
        """Run to the end; the saving of prompt tokens (BatchLLM, eq. 1)."""
        while not self.scheduler.idle():
            assert self.step()
        self.cache.check()
        assert self.cache.pool.num_held == 0
        return 1 - self.processed / self.logical

"""Scheduler and cache as they are, and no model: steps take what a cost model says."""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from onestem.cache import PagePool, PrefixCache
from onestem.cache.idle import IdleRuns
from onestem.engine.outputs import EngineStats
from onestem.engine.schedule.admission import SequenceFactory
from onestem.engine.schedule.answers import AnswerLimit, AnswerMemory
from onestem.engine.schedule.draft import StepDraft
from onestem.engine.schedule.pins import PinnedPrefixes
from onestem.engine.schedule.queue import HybridQueue, PlannedQueue
from onestem.engine.schedule.scheduler import Scheduler
from onestem.engine.schedule.throttle import StepLimits
from onestem.engine.sequence import Sequence, StepChanges
from onestem.pml import CompiledPrompt, Segment
from onestem.request import Request, SamplingParams
from onestem_lab.eviction.traces import Ask

__all__ = ["CachedFirst", "Result", "Simulation"]

PAGE = 16
STEP_TOKENS = 2048
# About an 8B model (32 layers, 32 heads of 128) on a large GPU: a prompt's row takes 16 GFLOP, and
# 0.5 MFLOP for each key that it sees, at 500 TFLOP/s. Answers of the traces are short, so that they
# are quick to simulate, and a step is long.
STEP_SECONDS, ROW_SECONDS, KEY_SECONDS = 20e-3, 32e-6, 1.05e-9


@dataclass
class Result:
    """Attributes:
    prompt_tokens: of all prompts.
    prompt_seconds: of computing them all.
    computed: tokens of prompts that were computed, again after a preemption too.
    seconds: that this took, without what a step takes anyway.
    preempted: sequences.
    admitted: when each request was.
    longest_wait: seconds that a request waited to be admitted, at most.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    computed: int = 0
    seconds: float = 0.0
    preempted: int = 0
    longest_wait: float = 0.0
    admitted: dict[Ask, float] = field(default_factory=dict)


def seconds_of(first: int, end: int) -> float:
    """Of computing tokens first..end-1 of a sequence."""
    return (end - first) * (ROW_SECONDS + KEY_SECONDS * (first + end) / 2)


class Rows:
    """Who decodes (`DecodingRows`, and the slots of those)."""

    def __init__(self) -> None:
        self.rows: dict[Sequence, None] = {}
        self._sequences: dict[int, Sequence] = {}
        self._numbers = itertools.count()

    @property
    def sequences(self) -> list[Sequence | None]:
        return list(self.rows)

    def any_stays(self, leave: list[Sequence]) -> bool:
        return any(sequence not in leave for sequence in self.rows)

    def page_ends(self) -> list[Sequence]:
        return [sequence for sequence in self.rows if sequence.next_place % PAGE == 0]

    def put(self, sequence: Sequence) -> None:
        sequence.table, sequence.sid = self, next(self._numbers)
        self._sequences[sequence.sid] = sequence

    def release(self, sequence: Sequence) -> None:
        self.rows.pop(sequence, None)
        del self._sequences[sequence.sid]
        sequence.table, sequence.sid = None, -1

    def num_launched(self, sid: int) -> int:
        return len(self._sequences[sid].tokens) - 1


class Simulation:
    """A trace with so much KV memory.

    Args:
        idle: which runs go first.
    """

    def __init__(self, asks: list[Ask], memory: int, idle: Callable[[PagePool], IdleRuns]) -> None:
        pool = PagePool(memory // PAGE, PAGE)
        self.idle = idle(pool)
        self.cache = PrefixCache(pool, idle=self.idle)
        self.result = Result()
        self.now = 0.0
        self._rows = Rows()
        self._asks = {str(number): ask for number, ask in enumerate(asks)}
        self._after: dict[Ask, list[str]] = {}
        self._coming: list[tuple[float, int, str]] = []
        self._came: dict[Ask, float] = {}
        self._waiting: list[str] = []
        self._numbers = itertools.count()
        jobs = [name for name, ask in self._asks.items() if ask.group is not None]
        for name, ask in self._asks.items():
            self.result.prompt_tokens += len(ask.prompt) + sum(n for _, n in ask.modules)
            self.result.prompt_seconds += _seconds_alone(ask)
            if ask.after is not None:
                self._after.setdefault(ask.after, []).append(name)
            elif ask.group is None:
                self._expect(ask.seconds, name)
        self._scheduler = self._make_scheduler(memory)
        if jobs:
            self._scheduler.waiting.queue = PlannedQueue(map(self._request, jobs))

    def _make_scheduler(self, memory: int) -> Scheduler:
        cache, self._queue = self.cache, HybridQueue(self.cache.tree, max_passed=0)
        pins = PinnedPrefixes(
            cache, self._queue.interactive, max_model_len=memory, bytes_per_token=1
        )
        config: Any = SimpleNamespace(max_position_embeddings=1 << 30)
        self._factory = SequenceFactory(
            config=config, pool=cache.pool, kept_pages=lambda: 0, tokenizer=None, grammars=None,
            max_model_len=memory, together=True, seed=0, stats=EngineStats(),
        )  # fmt: skip
        limits = StepLimits(step_tokens=STEP_TOKENS)
        answers = AnswerMemory(AnswerLimit(most=0, max_model_len=1, kv_tokens=1))
        return Scheduler(cache, self._queue, self._factory, pins, limits=limits, answers=answers)

    def _expect(self, seconds: float, name: str) -> None:
        heapq.heappush(self._coming, (seconds, next(self._numbers), name))

    def _request(self, name: str) -> Request:
        ask = self._asks[name]
        prompt = array("i", ask.prompt.tobytes())
        return Request(
            request_id=name,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=len(ask.answer), temperature=0, ignore_eos=True),
            pml=_compiled(ask) if ask.modules else None,
            in_conversation=ask.marked,
            group=ask.group,
            group_prefix_tokens=ask.group_prefix,
            priority="interactive" if ask.group is None else "job",
        )

    def run(self) -> Result:
        """To the end."""
        while self._coming or not self._scheduler.idle():
            while self._coming and self._coming[0][0] <= self.now:
                seconds, _, name = heapq.heappop(self._coming)
                self._came[self._asks[name]] = seconds
                self._queue.interactive.push(self._request(name))
                self._waiting.append(name)
            if self._scheduler.idle():
                self.now = self._coming[0][0]
            else:
                self._step()
        self.result.preempted = self._scheduler.room.num_preempted
        self.cache.check()
        return self.result

    def _step(self) -> None:
        draft = StepDraft()
        self._scheduler.decide(draft, self._rows)
        changes = draft.changes
        assert not changes.unfit
        for chunk in changes.chunks:
            self._note_admitted(self._ask(chunk.sequence))
        for sequence in changes.leave:
            self._rows.rows.pop(sequence)
        self._rows.rows.update((sequence, None) for sequence in changes.enter)
        self.now += STEP_SECONDS + self._compute(changes)
        samples = list(self._rows.rows)
        for chunk in changes.chunks:
            samples += chunk.samples
            for sequence in chunk.samples:
                self._rows.put(sequence)
        for sequence in samples:
            self._sample(sequence)

    def _ask(self, sequence: Sequence) -> Ask:
        return self._asks[sequence.state.request.request_id]

    def _note_admitted(self, ask: Ask) -> None:
        if ask not in self.result.admitted:
            self.result.admitted[ask] = self.now
            wait = self.now - self._came.get(ask, self.now)
            self.result.longest_wait = max(self.result.longest_wait, wait)

    def _compute(self, changes: StepChanges) -> float:
        """Seconds of a step's prompts."""
        total = 0.0
        for chunk in changes.chunks:
            imports = chunk.sequence.imports if chunk.module is None else ()
            seen = sum(one.in_use for one in imports)
            self.result.computed += chunk.end - chunk.start
            total += seconds_of(seen + chunk.start, seen + chunk.end)
        self.result.seconds += total
        return total

    def _sample(self, sequence: Sequence) -> None:
        ask = self._ask(sequence)
        sequence.extend((int(ask.answer[sequence.num_output]),))
        if sequence.num_left > 0:
            return
        sequence.leave_table()
        sequence.finish_reason = "length"
        self._scheduler.room.finish(sequence)
        self._factory.states.pop(sequence.state.request.request_id)
        for name in self._after.get(ask, ()):
            self._expect(self.now + self._asks[name].seconds, name)


class CachedFirst(Simulation):
    """Who waits and has least to compute is admitted first."""

    def _step(self) -> None:
        queue = self._queue.interactive
        found = [one for one in map(queue.remove, self._waiting) if one is not None]
        self._waiting = [one.request_id for one in sorted(found, key=self._missing)]
        for name in self._waiting:
            queue.push(self._request(name))
        super()._step()

    def _missing(self, request: Request) -> int:
        prompt = self._asks[request.request_id].prompt
        return len(prompt) - self.cache.tree.match(prompt, len(prompt) - 1)[1]


def _seconds_alone(ask: Ask) -> float:
    imported = sum(tokens for _, tokens in ask.modules)
    own = seconds_of(imported, imported + len(ask.prompt))
    return own + sum(seconds_of(0, tokens) for _, tokens in ask.modules)


def _compiled(ask: Ask) -> CompiledPrompt:
    segments, position = [], 0
    for name, tokens in ask.modules:
        ids = np.zeros(tokens, np.int32)
        segments.append(Segment("cached", ids, position, name, key=name))
        position += tokens
    segments.append(Segment("text", ask.prompt, position, "prompt"))
    return CompiledPrompt("trace", "anchored", tuple(segments), position + len(ask.prompt))

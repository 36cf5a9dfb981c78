"""The engine: requests in, steps, outputs. One loop for chat, jobs and scoring."""

from __future__ import annotations

import math
import secrets
import time
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from typing import Any

from torch import Tensor

from onestem.cache import PagePool, PrefixCache, Run
from onestem.engine.admission import check_pml, check_request, choice_ids
from onestem.engine.advance import Advance
from onestem.engine.detokenize import IncrementalDetokenizer
from onestem.engine.grammar import GrammarCompiler
from onestem.engine.inputs import LogitRow, StepInputs, build_inputs
from onestem.engine.jobs import Jobs
from onestem.engine.modules import PmlPrompt
from onestem.engine.outputs import aborted_output, refused_output, request_output
from onestem.engine.pins import PREFIX, PinnedPrefixes, PrefixInfo
from onestem.engine.queue import HybridQueue, PlannedQueue
from onestem.engine.random import derive_seed
from onestem.engine.reuse import explain
from onestem.engine.runner import Runner, ShareMode
from onestem.engine.sampler import (
    MaskedRowError,
    NonFiniteLogitsError,
    Sampler,
    SamplingRow,
    logprobs_of,
)
from onestem.engine.scheduler import Chunk, Scheduler
from onestem.engine.sequence import RequestState, Sequence
from onestem.engine.snapshot import snapshot
from onestem.engine.stats import EngineStats
from onestem.engine.streak import Streak, StreakHost, fits_streak
from onestem.engine.tokenizer import Tokenizer
from onestem.errors import ConfigError, RequestError
from onestem.models.config import GenerationDefaults
from onestem.models.decoder import Decoder
from onestem.ops import AttentionImpl, resolve
from onestem.request import (
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)

__all__ = ["Engine", "EngineStats"]

# Steps that the scheduler makes after a row of a streak needed more of the sampler.
STEPS_AFTER_UNSURE = 16
MOST_STEPS_AFTER_UNSURE = 1024
# Steps of a streak in which jobs run beside interactive requests, and in which they pause.
MIXED_STEPS = 16
REFERENCE_STEPS = 6

NOT_FINITE = "the logits are not finite: the weights are damaged, or overflow in this dtype"


class Engine:
    """Answers requests with one model.

    Args:
        decoder: the model.
        tokenizer: None for a model without one: prompts are token ids and there is no text.
        defaults: the model's sampling defaults and end-of-sequence ids.
        share: `full`; `storage` (prefixes stored once, read by each sequence); `off` (nothing
            shared); `no-attention` (the ceiling: answers mean nothing).
        num_pages, page_size: KV memory.
        max_model_len: most tokens of prompt and answer; None: the model's limit or what fits.
        max_step_tokens: most prompt rows of a step.
        max_step_seconds: what a step may take, by the measured time of a prompt's row; None: no
            limit but `max_step_tokens`.
        impl: attention implementation.
        seed: source of seeds for requests that have none; None draws from the system.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults,
        *,
        num_pages: int,
        page_size: int = 16,
        share: ShareMode = "full",
        max_model_len: int | None = None,
        max_step_tokens: int = 512,
        max_step_seconds: float | None = None,
        impl: str = "auto",
        seed: int | None = None,
    ) -> None:
        if share not in ("full", "storage", "off", "no-attention"):
            raise ConfigError(f"share is {share!r}, expected full, storage, off or no-attention")
        for name, value in (
            ("page_size", page_size),
            ("num_pages", num_pages),
            ("max_step_tokens", max_step_tokens),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")
        if max_step_seconds is not None and not max_step_seconds > 0:
            raise ConfigError(f"max_step_seconds is {max_step_seconds}, expected above 0, or None")
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.share = share
        self.max_model_len = _model_len(decoder, num_pages * page_size, max_model_len)
        self.impl = _attention_for(decoder, impl)
        self.stats = EngineStats()
        self._runner = _make_runner(
            decoder, self.impl, num_pages=num_pages, page_size=page_size, share=share
        )
        self.cache = PrefixCache(PagePool(num_pages, page_size), enabled=share != "off")
        self._queue = HybridQueue()
        self._fifo = self._queue.interactive
        self.scheduler = Scheduler(
            self.cache,
            self._queue,
            self._open,
            max_step_tokens=max_step_tokens,
            max_step_seconds=max_step_seconds,
        )
        self.scheduler.on_admitted = self._note_admitted
        self.pins = PinnedPrefixes(
            self.cache,
            max_model_len=self.max_model_len,
            bytes_per_token=decoder.kv_bytes_per_token,
        )
        self._jobs = Jobs()
        self._refused: list[RequestOutput] = []  # requests of jobs that can never be answered
        self._sampler = Sampler(decoder.config.vocab_size, defaults)
        self._grammars = (
            GrammarCompiler(tokenizer, decoder.config.vocab_size, defaults.eos_token_ids or None)
            if tokenizer
            else None
        )
        self._states: dict[str, RequestState] = {}
        self._seed = seed
        self._arrivals: dict[str, float] = {}  # of requests that are not open yet
        self._runs_a_job = False
        self._checked_at = 0
        self._streak: Streak | None = None
        self._touched: dict[RequestState, None] = {}  # had news since the last step
        self._streak_head: object = None  # who waited first when the streak began
        self._streak_jobs = 0  # its rows that are jobs'
        self._sure_from = 0  # the scheduler's step from which streaks are tried again
        self._pause = STEPS_AFTER_UNSURE
        self._streak_host = StreakHost(
            accept=self._accept,
            append=self._append_many,
            finish=self._finish,
            num_left=self._num_left,
            eos_token_ids=defaults.eos_token_ids,
            depth=self._runner.depth,
        )

    # ----------------------------------------------------------------------------- requests

    def validate(self, request: Request) -> None:
        """Raise `RequestError` for a request that can never be answered."""
        check_request(
            request,
            max_model_len=self.max_model_len,
            vocab_size=self.decoder.config.vocab_size,
            tokenizer=self.tokenizer,
            grammars=self._grammars,
        )
        if request.pml is not None:
            pool = self.cache.pool
            check_pml(request.pml, self.decoder.config, pool.num_pages, pool.page_size)

    def add_request(self, request: Request) -> None:
        """Queue a request; its outputs come from `step`."""
        self._check_id(request)
        self.validate(request)
        self._arrivals[request.request_id] = time.monotonic()
        self._fifo.push(request)

    def _check_id(self, request: Request) -> None:
        if request.request_id in self._states or request.request_id in self._fifo:
            raise RequestError(
                f"request id {request.request_id!r} is in use: give each request its own"
            )

    def add_job(self, job_id: str, requests: Iterable[Request]) -> None:
        """Queue a job behind those that are here: its requests (in planned order, read as there is
        room) run in what interactive requests leave free. One that can never be answered comes back
        from `step` as an error.

        Raises:
            RequestError: the engine has a job of this name.
        """
        self._jobs.add(job_id)
        self._queue.add_job(job_id, filter(None, (self._of_job(job_id, r) for r in requests)))

    def _of_job(self, job_id: str, request: Request) -> Request | None:
        try:
            self._validated(request)
        except RequestError as error:
            self._refused.append(refused_output(request, str(error)))
            return None
        self._jobs.opened(job_id, request.request_id)
        return request

    def remove_job(self, job_id: str) -> list[RequestOutput]:
        """Forget a job's requests that have not begun, and abort the others: their outputs."""
        self._queue.remove_job(job_id)
        outputs = []
        for request_id in self._jobs.remove(job_id):
            self._arrivals.pop(request_id, None)
            outputs.append(self.abort(request_id))
        return [output for output in outputs if output is not None]

    @property
    def job_ids(self) -> list[str]:
        """Jobs that have requests here."""
        return self._jobs.unfinished(self._queue.job_ids)

    def pin_prefix(self, name: str, token_ids: SequenceABC[int], cache_salt: str = "") -> None:
        """Compute a prefix (through `step`) and keep it until `unpin_prefix`.

        Raises:
            RequestError: the name is taken, or too little memory would be left.
        """
        self.add_request(self.pins.add(name, token_ids, cache_salt))

    def unpin_prefix(self, name: str) -> None:
        """Let a prefix go: it stays cached until its memory is wanted."""
        self.abort(PREFIX + name)
        self.pins.remove(name)

    def prefixes(self) -> list[PrefixInfo]:
        """The pinned prefixes."""
        return self.pins.infos(self.scheduler.running, self.scheduler.version)

    def snapshot(self) -> dict[str, Any]:
        """The state in plain values (`onestem.engine.snapshot`)."""
        return snapshot(self)

    @property
    def num_waiting(self) -> int:
        """Interactive requests that are not admitted, and sequences that were set back."""
        return len(self._fifo) + len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that are admitted."""
        return len(self.scheduler.running)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its pages are free at once. None if it is not here."""
        self._close_streak()
        waiting = self._fifo.remove(request_id)
        if waiting is not None:
            self._arrivals.pop(request_id, None)
            return aborted_output(waiting)
        state = self._states.get(request_id)
        if state is None:
            return None
        for index in range(len(state.sequences), state.request.params.n):
            # Its n sequences have not parted yet: each still ends once.
            sequence = self._sequence(state, index)
            sequence.finish_reason = "abort"
            state.sequences.append(sequence)
        for sequence in state.sequences:
            if sequence.finish_reason is None:
                self._finish(sequence, "abort")
        self._touched.pop(state, None)
        return request_output(state)

    def has_unfinished(self) -> bool:
        """Whether a step has something to do. An engine that falls idle checks its books."""
        if not self.scheduler.idle() or self._touched or self._refused:
            return True
        if self._checked_at != self.scheduler.step:
            self._checked_at = self.scheduler.step
            self.check()
        return False

    def run(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Answer requests in the given order, read as there is room for them; yield each as it
        finishes. Requests of a planned group must follow each other. Whatever is unfinished when
        the iterator is closed is aborted.

        Raises:
            RequestError: the engine has other requests; or, when it is read, a request that can
                never be answered.
        """
        if self._runs_a_job or self._states or self._queue.peek() is not None:
            raise RequestError(
                "the engine has unfinished requests: let them end first, or use another engine"
            )
        self._runs_a_job = True
        self.scheduler.queue = PlannedQueue(map(self._validated, requests))
        try:
            while self.has_unfinished():
                yield from (output for output in self.step() if output.finished)
        finally:
            for request_id in list(self._states):
                self.abort(request_id)
            self.scheduler.queue = self._queue
            self.scheduler.release_groups()
            self._arrivals.clear()
            self._touched.clear()
            self._runs_a_job = False

    def _validated(self, request: Request) -> Request:
        self._check_id(request)
        self.validate(request)
        self._arrivals[request.request_id] = time.monotonic()
        return request

    def _open(self, request: Request) -> list[Sequence]:
        """Make a request's sequences: one that computes the prompt for all n, unless nothing is
        shared; one for each choice."""
        state = RequestState(
            request,
            self._seed_of(request),
            RequestMetrics(
                num_prompt_tokens=len(request.prompt_token_ids),
                arrival_time=self._arrivals.pop(request.request_id, time.monotonic()),
            ),
            pml=PmlPrompt(request.pml, request.cache_salt) if request.pml is not None else None,
        )
        self._states[request.request_id] = state
        self.stats.requests += 1
        if request.params.choices:
            state.sequences = [
                self._scoring(state, i, ids)
                for i, ids in enumerate(choice_ids(request, self._tokenizer_for_text()))
            ]
        else:
            count = request.params.n if self.share == "off" else 1
            state.sequences = [self._sequence(state, i) for i in range(count)]
            state.forked = count == request.params.n
        self.stats.logical_prompt_tokens += len(request.prompt_token_ids) * max(
            len(state.sequences), request.params.n
        )
        return list(state.sequences)

    def _seed_of(self, request: Request) -> int:
        if request.params.seed is not None:
            return request.params.seed
        if self._seed is None:
            return secrets.randbits(63)
        return derive_seed(self._seed, request.request_id)

    def _sequence(self, state: RequestState, index: int) -> Sequence:
        request, params = state.request, state.request.params
        sequence = Sequence(state, index, array("i", state.own_prompt))
        sequence.most_tokens = self._most_tokens(state)
        if index == 0:
            sequence.score_from = _first_scored(request)
        if self.tokenizer is not None and (params.stop or request.stream):
            sequence.detokenizer = IncrementalDetokenizer(
                self.tokenizer, params, request.prompt_token_ids
            )
        if params.response_format is not None and self._grammars is not None:
            sequence.grammar = self._grammars.compile(params.response_format)
        return sequence

    def _most_tokens(self, state: RequestState) -> int:
        """Of a sequence: what it imports takes its part of the model's length and of memory."""
        if state.pml is None:
            return self.max_model_len
        config, pool = self.decoder.config, self.cache.pool
        return min(
            self.max_model_len - state.metrics.num_prompt_tokens + len(state.pml.tokens),
            state.pml.most_tokens(
                max_positions=config.max_position_embeddings,
                num_pages=pool.num_pages,
                page_size=pool.page_size,
            ),
        )

    def _tokenizer_for_text(self) -> Tokenizer:
        assert self.tokenizer is not None  # `validate` saw to it
        return self.tokenizer

    def _scoring(self, state: RequestState, index: int, ids: list[int]) -> Sequence:
        sequence = Sequence(state, index, array("i", [*state.own_prompt, *ids]))
        sequence.num_prompt = len(state.own_prompt)
        sequence.score_from = sequence.num_prompt
        sequence.score_only = True
        return sequence

    # ----------------------------------------------------------------------------- a step

    def step(self) -> list[RequestOutput]:
        """Compute one step; outputs of requests that finished in it or that stream."""
        if self._streak is not None and (self._newcomer() or self._streak_is_long(self._streak)):
            self._close_streak()
        if self._streak is None or not self._streak_step(self._streak):
            self._scheduled_step()
        touched, self._touched = self._touched, {}
        refused, self._refused = self._refused, []
        return refused + [
            request_output(state)
            for state in touched
            if (state.finished or state.request.stream)
            and not state.request.request_id.startswith(PREFIX)
        ]

    def _scheduled_step(self) -> None:
        started = time.perf_counter()
        try:
            chunks = self.scheduler.schedule()
            if not chunks:
                return
            self._note_scheduled(chunks)
            inputs, prepared = self._build(chunks)
            built = time.perf_counter()
            logits = self._runner.run(inputs, prepared)
        except BaseException:
            # Ctrl-C, or memory: what was scheduled has no KV, and nobody may take it for computed.
            self.scheduler.undo()
            raise
        computed = time.perf_counter()
        try:
            self._commit(chunks, inputs, logits)
        except BaseException:
            # On a GPU it is here that a step is waited for.
            self.scheduler.retake()
            raise
        ended = time.perf_counter()
        self.scheduler.note_step(ended - started)
        self._count(built - started, computed - built, ended - computed)
        if inputs.decodes is not None:
            self._streak = self._new_streak(inputs)

    def _build(self, chunks: list[Chunk]) -> tuple[StepInputs, Any]:
        inputs = build_inputs(
            chunks,
            page_size=self.cache.pool.page_size,
            windows=self._runner.windows,
            version=self.scheduler.version,
            share=self.share != "storage",
        )
        return inputs, self._runner.prepare(inputs)

    def _note_admitted(self, sequence: Sequence) -> None:
        path = sequence.path(self.scheduler.version)
        if self.cache.enabled and sequence.state.reuse is None:
            sequence.state.reuse = explain(sequence, path, self.pins.deepest(path))
        self.pins.admitted(sequence, path)

    def _note_scheduled(self, chunks: list[Chunk]) -> None:
        now, pool = time.monotonic(), self.cache.pool
        self.stats.peak_kv_tokens = max(self.stats.peak_kv_tokens, pool.num_held * pool.page_size)
        for chunk in chunks:
            metrics = chunk.sequence.state.metrics
            metrics.first_scheduled_time = metrics.first_scheduled_time or now

    def _count(self, host: float, model: float, sample: float) -> None:
        stats = self.stats
        stats.steps += 1
        stats.host_seconds += host
        stats.model_seconds += model
        stats.sample_seconds += sample
        stats.set_backs = self.scheduler.num_set_backs

    def _commit(self, chunks: list[Chunk], inputs: StepInputs, logits: Tensor) -> None:
        """Take the step's results; `_touched` gets the requests that have news."""
        for chunk in chunks:
            rows = chunk.num_prompt_rows
            chunk.sequence.state.metrics.num_computed_tokens += rows
            self.stats.processed_prompt_tokens += rows
        self._score(inputs.wanted, logits)
        self._sample(inputs.wanted, logits)

    # ----------------------------------------------------------------------------- streaks

    def _new_streak(self, inputs: StepInputs) -> Streak | None:
        """Go on without the scheduler, if all who run were in this step and fit."""
        assert inputs.decodes is not None
        rows = inputs.decodes
        everyone = len(rows.sequences) + self.scheduler.num_paused == len(self.scheduler.running)
        if not everyone or self._sure_from > self.scheduler.step:
            return None
        if not all(map(self._fits_streak, rows.sequences, rows.runs)):
            return None
        sampling = [self._row(sequence) for sequence in rows.sequences]
        drawing = self._sampler.drawing(sampling, self.decoder.device)
        if drawing is None:
            return None
        advance = Advance(inputs, self.cache, self._runner.scratch_slot)
        self._streak_head = self._head()
        self._streak_jobs = sum(sequence.is_job for sequence in rows.sequences)
        return Streak(
            inputs, advance, self._runner, drawing, self._streak_host, waiting=self._someone_waits()
        )

    def _fits_streak(self, sequence: Sequence, run: Run) -> bool:
        return (
            sequence.finish_reason is None
            and fits_streak(sequence)
            and sequence.run is run
            and run.end == len(sequence.tokens)
            and self.cache.may_grow(run)
        )

    def _someone_waits(self) -> bool:
        return bool(self.scheduler.waiting) or self.scheduler.queue.peek() is not None

    def _head(self) -> object:
        """Who would be admitted next."""
        waiting, first = self.scheduler.waiting, self.scheduler.queue.peek()
        if waiting and (first is None or first.priority == "job" or not waiting[0].is_job):
            return waiting[0]
        return first

    def _newcomer(self) -> bool:
        """Whether a request came since the streak began, that might be admitted."""
        head = self._head()
        return head is not None and head is not self._streak_head

    def _streak_is_long(self, streak: Streak) -> bool:
        """Where jobs run beside interactive requests, their share is looked at now and then."""
        mixed = 0 < self._streak_jobs < len(streak.sequences)
        if not mixed and not self.scheduler.num_paused:
            return False
        return streak.num_steps >= (MIXED_STEPS if self._streak_jobs else REFERENCE_STEPS)

    def _streak_step(self, streak: Streak) -> bool:
        """Whether the streak computed a step; it has closed if not."""
        started, host, steps = time.perf_counter(), streak.host_seconds, streak.num_steps
        try:
            streak.step()
            self._note_closed()
        except BaseException:
            streak.abandon()
            self._streak = None
            raise
        host = streak.host_seconds - host
        self.scheduler.step += 1
        self.stats.steps += streak.num_steps - steps
        self.stats.host_seconds += host
        seconds = time.perf_counter() - started
        self.stats.model_seconds += seconds - host
        launched_only = 2 * (self._streak_host.depth - 1)
        if streak.num_steps > launched_only:
            interactive = len(streak.sequences) - self._streak_jobs
            self.scheduler.note_decodes(interactive, self._streak_jobs, seconds)
        pool = self.cache.pool
        self.stats.peak_kv_tokens = max(self.stats.peak_kv_tokens, pool.num_held * pool.page_size)
        return streak.num_steps > steps

    def _note_closed(self) -> None:
        """A closed streak is let go. After one that began with an unsure row they are tried ever
        more rarely: its rows will be unsure again."""
        assert self._streak is not None
        if not self._streak.closed:
            return
        if self._streak.unsure:
            short = self._streak.num_steps < STEPS_AFTER_UNSURE
            longer = min(2 * self._pause, MOST_STEPS_AFTER_UNSURE)
            self._pause = longer if short else STEPS_AFTER_UNSURE
            self._sure_from = self.scheduler.step + self._pause
        self._streak = None

    def _close_streak(self) -> None:
        """Take what a streak still computes; its news come with the next step."""
        if self._streak is not None:
            self._streak.close()
            self._note_closed()

    def _append_many(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Tokens of a streak, seen by nobody so far."""
        run = sequence.run
        assert run is not None
        sequence.tokens.extend(token_ids)
        run.tokens.extend(token_ids)
        sequence.state.metrics.num_output_tokens += len(token_ids)
        self.stats.output_tokens += len(token_ids)

    def _score(self, wanted: list[LogitRow], logits: Tensor) -> None:
        rows = [i for i, row in enumerate(wanted) if not row.samples]
        if not rows:
            return
        targets = [wanted[i].sequence.tokens[wanted[i].index + 1] for i in rows]
        most = max(self._num_alternatives(wanted[i].sequence) for i in rows)
        for i, target, entry in zip(
            rows, targets, logprobs_of(logits[rows], targets, most), strict=True
        ):
            sequence = wanted[i].sequence
            if sequence.finish_reason is not None:
                continue
            self._touched[sequence.state] = None
            if not math.isfinite(entry[target]):
                sequence.stop_reason = NOT_FINITE
                self._finish(sequence, "error")
                continue
            self._note_score(wanted[i], target, entry)
            if sequence.score_only and wanted[i].index + 2 == len(sequence.tokens):
                self._finish(sequence, "stop")

    def _num_alternatives(self, sequence: Sequence) -> int:
        params = sequence.state.request.params
        if sequence.score_only:
            return params.logprobs or 0
        return params.prompt_logprobs or 0

    def _note_score(self, row: LogitRow, target: int, entry: TokenLogprobs) -> None:
        most = self._num_alternatives(row.sequence)
        kept = {t: p for rank, (t, p) in enumerate(entry.items()) if rank < most or t == target}
        known = row.index + 1 in row.sequence.scores  # computed again after a set-back
        row.sequence.scores[row.index + 1] = entry[target]
        if not row.sequence.score_only:
            row.sequence.state.prompt_logprobs[row.index + 1] = kept
        elif not known:
            row.sequence.logprobs.append(kept)

    def _sample(self, wanted: list[LogitRow], logits: Tensor) -> None:
        rows: list[int] = []
        sequences: list[Sequence] = []
        for i, row in enumerate(wanted):
            if row.samples and row.sequence.finish_reason is None:
                forks = self._fork(row.sequence)
                sequences.extend(forks)
                rows.extend([i] * len(forks))
        if not rows:
            return
        same = rows == list(range(len(wanted)))
        self._take(sequences, logits if same else logits[rows])

    def _take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Sample a token for each sequence from its row of the logits, and append it."""
        try:
            sampled = self._sampler.sample(logits, [self._row(sequence) for sequence in sequences])
        except (MaskedRowError, NonFiniteLogitsError) as error:
            self._sample_others(error, sequences, logits)
            return
        for sequence, token, entry in zip(
            sequences, sampled.token_ids, sampled.logprobs, strict=True
        ):
            self._accept(sequence, token, entry)

    def _sample_others(
        self,
        error: MaskedRowError | NonFiniteLogitsError,
        sequences: list[Sequence],
        logits: Tensor,
    ) -> None:
        """Sequences that cannot be continued (a grammar at its end before min_tokens, weights that
        overflow) end with an error; the others sample."""
        reason = (
            "no token may follow: response_format (with min_tokens, if set) forbids all of them"
            if isinstance(error, MaskedRowError)
            else NOT_FINITE
        )
        bad = set(error.rows)
        good = [row for row in range(len(sequences)) if row not in bad]
        for row in error.rows:
            sequences[row].stop_reason = reason
            self._finish(sequences[row], "error")
        if good:
            self._take([sequences[row] for row in good], logits[good])

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """The sequences that sample from this row: at the prompt's end all n of a request."""
        state = sequence.state
        if state.forked:
            return [sequence]
        state.forked = True
        for index in range(1, state.request.params.n):
            child = self._sequence(state, index)
            child.score_from = None
            self.scheduler.fork(sequence, child)
            state.sequences.append(child)
        # The parent last: its run may grow again once the others have branched off and ended.
        return [*state.sequences[1:], sequence]

    def _row(self, sequence: Sequence) -> SamplingRow:
        """What the sampler needs of a sequence; one object per sequence, brought up to date."""
        row = sequence.sampling
        if row is None:
            params = sequence.state.request.params
            eos = () if params.ignore_eos else self.defaults.eos_token_ids
            row = sequence.sampling = SamplingRow(
                params=params,
                seed=sequence.state.seed,
                sequence_index=sequence.index,
                token_index=0,
                prompt_token_ids=sequence.state.request.prompt_token_ids,
                output_token_ids=(),
                stop_ids=frozenset((*eos, *params.stop_token_ids)),
                allowed_mask=None,
            )
        row.token_index = sequence.num_output
        if self._sampler.reads_output(row.params):
            row.output_token_ids = sequence.output_ids
        row.allowed_mask = sequence.grammar.fill_mask() if sequence.grammar is not None else None
        return row

    def _num_left(self, sequence: Sequence) -> int:
        """Tokens that a sequence may still sample."""
        room = sequence.most_tokens - len(sequence.tokens)
        most = sequence.state.request.params.max_tokens
        return room if most is None else min(room, most - sequence.num_output)

    def _accept(self, sequence: Sequence, token: int, entry: TokenLogprobs | None = None) -> None:
        """Append a sampled token and see whether it ends the sequence."""
        metrics = sequence.state.metrics
        self._touched[sequence.state] = None
        metrics.num_output_tokens += 1
        metrics.first_token_time = metrics.first_token_time or time.monotonic()
        self.stats.output_tokens += 1
        self.scheduler.append(sequence, token)
        if entry is not None:
            sequence.logprobs.append(entry)
            sequence.cumulative_logprob += entry[token]
        if sequence.grammar is not None:
            sequence.grammar.accept(token)
        reason = self._ending(sequence, token)
        if reason is not None:
            self._finish(sequence, reason)

    def _ending(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.state.request.params
        may_stop = sequence.num_output >= params.min_tokens
        if may_stop and not params.ignore_eos and token in self.defaults.eos_token_ids:
            return "stop"
        if may_stop and token in params.stop_token_ids:
            sequence.stop_reason = token
            return "stop"
        if sequence.detokenizer is not None:
            sequence.text += sequence.detokenizer.append(token, check_stop=may_stop)
            if sequence.detokenizer.stop_reason is not None:
                sequence.stop_reason = sequence.detokenizer.stop_reason
                return "stop"
        if sequence.grammar is not None and sequence.grammar.is_finished:
            return "stop"
        return "length" if self._num_left(sequence) <= 0 else None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._touched[sequence.state] = None
        ended_by_text = sequence.detokenizer is not None and sequence.detokenizer.stop_reason
        if self.tokenizer is not None and not ended_by_text:
            self._finish_text(sequence, self.tokenizer)
        state = sequence.state
        if state.finished:
            state.metrics.finished_time = time.monotonic()
            del self._states[state.request.request_id]
            self._jobs.ended(state.request.request_id)
        self.scheduler.finish(sequence)
        if state.finished and reason != "abort":
            self.pins.computed(state.request.request_id)

    def _finish_text(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        """The rest of the text; all of it where nobody needed it before."""
        detokenizer = sequence.detokenizer
        if detokenizer is None:
            request = sequence.state.request
            detokenizer = IncrementalDetokenizer(
                tokenizer, request.params, request.prompt_token_ids
            )
            sequence.text = "".join(map(detokenizer.append, self._visible_ids(sequence)))
        sequence.text += detokenizer.finish()
        if detokenizer.stop_reason is not None and sequence.finish_reason != "abort":
            # An unfinished character's replacement completed a stop string.
            sequence.stop_reason, sequence.finish_reason = detokenizer.stop_reason, "stop"

    def _visible_ids(self, sequence: Sequence) -> list[int]:
        """Ids that make the text: not the one that ended it."""
        ids = sequence.output_ids.tolist()
        ended = sequence.finish_reason == "stop" and not sequence.score_only and ids
        return ids[:-1] if ended and self._ends(sequence, ids[-1]) else ids

    def _ends(self, sequence: Sequence, token: int) -> bool:
        params = sequence.state.request.params
        return token in params.stop_token_ids or (
            not params.ignore_eos and token in self.defaults.eos_token_ids
        )

    # ----------------------------------------------------------------------------- books

    def check(self) -> None:
        """Raise `CacheError` unless KV memory balances: free + cached == total."""
        self.cache.check()

    def reset_stats(self) -> None:
        self.stats = EngineStats()
        self.scheduler.num_set_backs = 0


def _attention_for(decoder: Decoder, name: str) -> AttentionImpl:
    config = decoder.config
    group = config.num_q_heads // config.num_kv_heads
    return resolve(name, decoder.device, head_dim=config.head_dim, group=group)


def _make_runner(decoder: Decoder, impl: AttentionImpl, **options: Any) -> Runner:
    """CUDA graphs where the attention can be in them."""
    if decoder.device.type != "cuda" or impl.name != "triton":
        return Runner(decoder, impl, **options)
    from onestem.engine.graphs import GraphRunner

    runner = GraphRunner(decoder, impl, **options)
    runner.warm_up()
    return runner


def _first_scored(request: Request) -> int | None:
    """The first prompt token whose log-probability is wanted; the very first has none."""
    wanted = [] if request.score_from is None else [max(1, request.score_from)]
    if request.params.prompt_logprobs is not None:
        wanted.append(1)
    return min(wanted, default=None)


def _model_len(decoder: Decoder, capacity: int, asked: int | None) -> int:
    limit = decoder.config.max_position_embeddings
    if asked is None:
        # Where memory is what limits, a round figure: the next start finds a little more or less
        # free, and a job that goes on must find the same limit.
        return limit if limit <= capacity else capacity - capacity % 1024 or capacity
    if asked < 2 or asked > limit:
        raise ConfigError(
            f"max_model_len is {asked}, expected 2 to {limit} (the model's positions)"
        )
    if asked > capacity:
        raise ConfigError(
            f"max_model_len is {asked}, KV memory holds {capacity} tokens: "
            "raise kv_memory or lower max_model_len"
        )
    return asked

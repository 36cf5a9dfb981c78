"""The engine: requests in, steps, outputs. One loop for chat, jobs and scoring."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable
from collections.abc import Sequence as SequenceABC
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from onestem.cache import PagePool, PrefixCache
from onestem.cache.storage import DiskStore, HostStore
from onestem.engine.grammar.compiler import GrammarCompiler
from onestem.engine.grammar.state import Grammar
from onestem.engine.modules.tiers import ModuleTiers
from onestem.engine.outputs import EngineStats, aborted_output, refused_output, request_output
from onestem.engine.residence import Residence
from onestem.engine.sampling.sampler import Sampler
from onestem.engine.schedule.admission import (
    SequenceFactory,
    check_format,
    check_pml,
    check_request,
    model_len,
)
from onestem.engine.schedule.answers import AnswerLimit, AnswerMemory, answer_memory_bytes
from onestem.engine.schedule.pins import (
    PREFIXES,
    PinnedPrefixes,
    PrefixInfo,
    PrefixRequest,
    prefix_id,
)
from onestem.engine.schedule.queue import Gate, HybridQueue, Jobs, PlannedQueue
from onestem.engine.schedule.scheduler import Scheduler, SourceError
from onestem.engine.schedule.throttle import FEWEST_ROWS
from onestem.engine.sequence import Chunk, Edits, RequestState
from onestem.engine.step.launch import Flight, Launcher, make_runner
from onestem.engine.step.order import Order
from onestem.engine.step.results import Results
from onestem.engine.step.runner import Logits, RankTeam, StepRunner
from onestem.engine.step.slots import Slots
from onestem.engine.step.suspects import Suspects
from onestem.engine.text.tokenizer import Tokenizer
from onestem.engine.trace import StepTrace
from onestem.errors import ConfigError, RankError, RequestError
from onestem.garbage import collecting_less
from onestem.interrupts import Held, uninterrupted
from onestem.models.config import GenerationDefaults
from onestem.models.decoder import Decoder
from onestem.ops import resolve
from onestem.options import EngineOptions
from onestem.pml import EncodedSegment, Segment
from onestem.request import Request, RequestOutput

__all__ = ["Engine", "EngineStats", "check_counts"]

log = logging.getLogger(__name__)

# A step that can only wait for a grammar ends after this, to see what else has come.
GATE_SECONDS = 0.02
# Rows that a device multiplies while it reads the weights.
FREE_ROWS = {"cuda": 200}
CHECK_SHARE = 0.001  # of the time may go into `Engine.check`


class Engine:
    """Answers requests with one model.

    Args:
        decoder: the model.
        tokenizer: None for a model without one: prompts are token ids and there is no text.
        defaults: the model's sampling defaults and end-of-sequence ids.
        options: how it is run.
        num_pages: pages of KV memory (`options.kv_memory` is what they were counted from).
        team: the other processes that hold the model together; None: one device holds it.

    Attributes:
        options: as given, with lengths, answer memory and attention as the engine chose them.
        on_begin: called with ids of interactive requests before the first step that they are in.
        residence: where weights and KV memory are.
        trace: where each step is recorded, if anywhere; the engine closes it.
        is_paused: nothing is computed, though requests are taken.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults,
        options: EngineOptions,
        *,
        num_pages: int,
        team: RankTeam | None = None,
    ) -> None:
        check_counts(num_pages=num_pages)
        page_size, share = options.page_size, options.share
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.share = share
        self.max_model_len = model_len(
            decoder.config.max_position_embeddings, num_pages * page_size, options.max_model_len
        )
        self.impl = resolve(options.impl, decoder.device, heads=decoder.part.head_shapes)
        max_step_tokens = options.max_step_tokens or decoder.step_rows
        answer_memory = answer_memory_bytes(options.answer_memory)
        self.options = options.replace(
            max_model_len=self.max_model_len,
            max_step_tokens=max_step_tokens,
            answer_memory=answer_memory,
            impl=self.impl.name,
        )
        self.stats = EngineStats()
        self.team = team
        runner: StepRunner = (make_runner if team is None else team.make_runner)(
            decoder, self.impl, num_pages=num_pages, page_size=page_size, share=share
        )
        self.residence = Residence(decoder, runner)
        self.cache = PrefixCache(PagePool(num_pages, page_size), enabled=share != "off")
        self._queue = HybridQueue(self.cache.tree, options.max_passed, self._gate)
        self._interactive = self._queue.interactive
        self.pins = PinnedPrefixes(
            self.cache,
            self._interactive,
            max_model_len=self.max_model_len,
            bytes_per_token=decoder.kv_bytes_per_token,
        )
        self._jobs = Jobs()
        self._sampler = Sampler(
            decoder.config.vocab_size,
            defaults,
            decoder.device,
            logprobs_mode=options.logprobs_mode,
        )
        named = () if tokenizer is None else tokenizer.end_ids
        eos = defaults.ends(named, decoder.config.vocab_size)
        if decoder.device.type == "cuda":
            self._sampler.warm_up()
        self._grammars = (
            GrammarCompiler(tokenizer, decoder.config.vocab_size, eos or None)
            if tokenizer
            else None
        )
        self._factory = SequenceFactory(
            decoder.config,
            self.cache.pool,
            kept_pages=lambda: self.pins.num_pages,
            tokenizer=tokenizer,
            grammars=self._grammars,
            max_model_len=self.max_model_len,
            together=share != "off",
            seed=options.seed,
            stats=self.stats,
        )
        answers = AnswerLimit(
            most=answer_memory,
            max_model_len=self.max_model_len,
            kv_tokens=num_pages * page_size,
        )
        self.scheduler = Scheduler(
            self.cache,
            self._queue,
            self._factory,
            self.pins,
            max_step_tokens=max_step_tokens,
            max_step_seconds=options.max_step_ms / 1000 if options.max_step_ms else None,
            max_num_seqs=options.max_num_seqs,
            free_rows=FREE_ROWS.get(decoder.device.type, FEWEST_ROWS),
            answers=AnswerMemory(answers),
        )
        slots = Slots(self._sampler, eos)
        self.order = Order(self.cache, slots, windows=runner.windows, share=share != "storage")
        self.launcher = Launcher(runner, self._sampler)
        self._suspects = Suspects()
        self._results = Results(
            scheduler=self.scheduler,
            slots=slots,
            sampler=self._sampler,
            eos_token_ids=eos,
            stats=self.stats,
        )
        self._states = self._factory.states
        self._committed_at = 0.0
        self._kinds = (False, False)  # whether the step before had interactive decodes, and jobs
        self._runs_a_job = False
        self.trace: StepTrace | None = None
        self.tiers: ModuleTiers | None = None  # see `keep_modules`
        self.on_begin: Callable[[list[str]], object] = lambda request_ids: None
        self.is_paused = False
        self._checked_at = 0
        self._check_from = 0.0

    # ----------------------------------------------------------------------------- requests

    def validate(self, request: Request) -> None:
        """Raise `RequestError` for a request that can never be answered. Compiles its grammar, so
        call it from a thread that nothing waits for."""
        self._check(request)
        self._compile(request)

    def prepare(
        self, request: Request, key: str = "", weight: float = 1.0
    ) -> Future[Grammar] | None:
        """`validate`, but without waiting for the grammar: what is wrong with the format is the
        future's exception; see `GrammarCompiler.prepare`. None: the request has no grammar. May be
        called from any thread."""
        self._check(request)
        if self._grammars is None:
            return None
        return self._grammars.prepare(request.params.response_format, key, weight)

    def _compile(self, request: Request) -> None:
        if self._grammars is not None:
            check_format(self._grammars.compile, request)

    def _check(self, request: Request) -> None:
        check_request(
            request,
            max_model_len=self.max_model_len,
            vocab_size=self.decoder.config.vocab_size,
            tokenizer=self.tokenizer,
            max_num_seqs=self.scheduler.max_num_seqs,
            answers=self.scheduler.answers.limit,
        )
        self._sampler.settings_of(request.params)
        pool = self.cache.pool
        check_pml(
            request,
            self.decoder.config,
            self.tokenizer,
            num_pages=pool.num_pages - self.pins.num_pages,
            page_size=pool.page_size,
        )

    def add_request(self, request: Request, *, key: str = "", weight: float = 1.0) -> None:
        """Queue a request; its outputs come from `step`. One with a grammar that is not compiled
        yet waits until it is; others pass it. If it cannot be compiled, the request
        comes back as an error.

        Args:
            key: whose it is; where requests of several keys wait, the keys take turns.
            weight: the key's share of turns.

        Raises:
            RequestError: it can never be answered.
        """
        self._admissible(request)
        self._interactive.push(request, key, weight)

    def _gate(self, request: Request, key: str, weight: float) -> Gate:
        """A grammar that is not compiled yet delays its request, and no other."""
        answer, reason = self._factory.gate(request, key, weight)
        if answer is Gate.REFUSE:
            self._factory.forget(request.request_id)
            self._jobs.ended(request.request_id)
            self._factory.refused.append(refused_output(request, reason))
        return answer

    def _prefetch(self, request: Request) -> None:
        """While a request waits, read modules that it needs from the disk."""
        if self.tiers is not None and request.pml is not None:
            self.prefetch_modules(
                [s for s in request.pml.segments if s.kind == "cached"], request.module_salt
            )

    def prefetch_modules(
        self, segments: Iterable[Segment | EncodedSegment], cache_salt: str = ""
    ) -> None:
        """Read modules that may soon be wanted from the disk, if they are only there."""
        if self.tiers is not None:
            store = self.cache.modules
            self.tiers.prefetch(
                ((cache_salt, segment.key), len(segment.token_ids))
                for segment in segments
                if store.get((cache_salt, segment.key, None)) is None
            )

    def _check_id(self, request: Request) -> None:
        here = (self._states, self._factory.arrivals, self._interactive)
        if any(request.request_id in each for each in here):
            raise RequestError(
                f"request id {request.request_id!r} is in use: give each request its own"
            )

    def add_job(
        self,
        job_id: str,
        requests: Iterable[Request],
        *,
        first: bool = False,
        groups: dict[int, int] | None = None,
    ) -> None:
        """Queue a job after those that are here. Its requests, in planned order and read as there
        is room, run in what interactive requests leave free. One that can never be answered comes
        back from `step` as an error. `step` raises an exception of the iterator, and the next step
        reads on.

        Args:
            first: before other jobs' requests, except those that have begun.
            groups: one empty dict for all parts of a job that comes in parts, each a job here:
                their groups of one number are the same group. None: the job is whole.

        Raises:
            RequestError: the engine has a job of this name that has not ended.
        """
        self._jobs.unfinished(self._queue.job_ids)
        self._jobs.add(job_id)
        # Not a generator, which would end with the first error that it passes on.
        checked = filter(None, map(partial(self._of_job, job_id), requests))
        self._queue.add_job(job_id, checked, first=first, groups=groups)

    def _of_job(self, job_id: str, request: Request) -> Request | None:
        try:
            self._admissible(request)
        except RequestError as error:
            self._factory.refused.append(refused_output(request, str(error)))
            return None
        self._jobs.opened(job_id, request.request_id)
        return request

    def remove_job(self, job_id: str) -> list[RequestOutput]:
        """Forget a job's requests that have not begun, and abort the others. Returns
        their outputs."""
        self._queue.remove_job(job_id)
        outputs = []
        for request_id in self._jobs.remove(job_id):
            self._factory.forget(request_id)
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
        request = self.pins.add(name, token_ids, cache_salt)
        try:
            self.add_request(request, key=PREFIXES)
        except RequestError:
            self.pins.remove(name)
            raise

    def unpin_prefix(self, name: str) -> None:
        """Unpin a prefix: it stays cached until its memory is wanted."""
        if not self.pins.remove(name):
            self.abort(prefix_id(name))
        self.scheduler.is_short = False

    def prefixes(self) -> list[PrefixInfo]:
        """The pinned prefixes."""
        return self.pins.infos(self.scheduler.running, self.scheduler.version)

    @property
    def num_waiting(self) -> int:
        """Interactive requests that are not admitted, and their sequences that were preempted."""
        back = sum(not sequence.is_job for sequence in self.scheduler.waiting)
        return len(self._interactive) + back

    @property
    def num_running(self) -> int:
        """Sequences that are admitted."""
        return len(self.scheduler.running)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its pages are free at once. None if it is not here."""
        waiting = self._interactive.remove(request_id)
        if waiting is not None:
            self._factory.forget(request_id)
            return aborted_output(waiting)
        state = self._states.get(request_id)
        if state is None:
            return None
        for sequence in list(state.sequences):
            if sequence.finish_reason is None:
                with uninterrupted():
                    self._results.finish(sequence, "abort")
        self._rest()
        self._forget_ended()
        self._results.touched.pop(state, None)
        output = request_output(state)
        state.let_go()
        return output

    def has_unfinished(self) -> bool:
        """Whether a step has something to do. An engine that falls idle calls `check` now and
        then."""
        if self._queue.holds or self._results.touched or self._factory.refused:
            return True
        if not self.scheduler.idle():
            return True
        self._check_now_and_then()
        return False

    def _check_now_and_then(self) -> None:
        """Not each time: recounting many runs takes long, and a request may come any moment."""
        started = time.monotonic()
        if self._checked_at != self.scheduler.step and started >= self._check_from:
            self._checked_at = self.scheduler.step
            self.check()
            ended = time.monotonic()
            self._check_from = ended + (ended - started) / CHECK_SHARE

    def run(self, requests: Iterable[Request]) -> Generator[RequestOutput]:
        """Answer requests in the given order, read as there is room for them; yield each as it
        finishes, and those that stream as they grow. Requests of a planned group must follow each
        other. Whatever is unfinished when the iterator is closed is aborted.

        Raises:
            RequestError: the engine has other requests, or was put to sleep; or, when it is read, a
                request that can never be answered.
        """
        self.residence.check_ready()
        if self._runs_a_job or self._states or self._has_waiting():
            raise RequestError(
                "the engine has unfinished requests: let them end first, or use another engine"
            )
        self._runs_a_job = True
        self.scheduler.queue = PlannedQueue(map(self._validated, requests))
        try:
            with collecting_less():
                while self.has_unfinished():
                    self.residence.check_ready()
                    yield from self.step()
        finally:
            with uninterrupted():
                for request_id in list(self._states):
                    self.abort(request_id)
                self.scheduler.queue = self._queue
                self.scheduler.groups.release_all()
                self._factory.arrivals.clear()
                self._results.touched.clear()
                self._runs_a_job = False

    def _has_waiting(self) -> bool:
        return self._queue.peek() is not None or self._queue.holds

    def _validated(self, request: Request) -> Request:
        self._admissible(request)
        self._compile(request)
        return request

    def _admissible(self, request: Request) -> None:
        """Check all of `validate` but the grammar, for which a request waits at the gate."""
        self.residence.check_ready()
        self._check_id(request)
        self._check(request)
        if self._grammars is not None:
            check_format(self._grammars.check, request)
        self._prefetch(request)
        self._factory.arrivals[request.request_id] = time.monotonic()

    def _forget_ended(self) -> None:
        """Forget requests whose last sequence has ended."""
        for state in self._results.ended:
            request = state.request
            self._states.pop(request.request_id, None)
            self._jobs.ended(request.request_id)
            aborted = any(sequence.finish_reason == "abort" for sequence in state.sequences)
            if isinstance(request, PrefixRequest) and not aborted:
                self.pins.computed(request)
        self._results.ended.clear()

    # ----------------------------------------------------------------------------- a step

    def step(self) -> list[RequestOutput]:
        """Compute one step; outputs of requests that finished in it or that stream."""
        outputs, going_on = self.step_news()
        return outputs + [request_output(state) for state in going_on]

    def step_news(self) -> tuple[list[RequestOutput], list[RequestState]]:
        """`step` for a caller that streams: outputs of requests that finished, and states of
        streaming requests that have news and go on."""
        if self._queue.holds and not self._states and self._queue.peek() is None:
            self._factory.wait(GATE_SECONDS)
        with uninterrupted() as interrupts:
            try:
                if self.can_step:
                    self._step(interrupts)
            except BaseException as error:
                if not isinstance(error, Exception) or error is interrupts.raised:
                    self._recover()  # Ctrl-C, or what another signal's handler raised
                    raise
                self._contain(error)
        self._forget_ended()
        touched, self._results.touched = self._results.touched, {}
        outputs, self._factory.refused = self._factory.refused, []
        going_on = []
        for state in touched:
            is_asked_for = not isinstance(state.request, PrefixRequest)
            if state.finished:
                outputs += [request_output(state)] if is_asked_for else []
                state.let_go()
            elif state.request.stream and is_asked_for:
                going_on.append(state)
        return outputs, going_on

    def _step(self, interrupts: Held) -> None:
        """Choose the rows of the next step, launch it, and take what the one before gave (on a CPU:
        what it gave itself)."""
        tried, launcher = self._suspects.tried, self.launcher
        began = time.perf_counter()
        edits = self.scheduler.edits(self.order, may_preempt=not launcher.flights, only=tried)
        if self.scheduler.opened:
            self.on_begin(self.scheduler.opened)
        has_rows = edits is not None and self._apply(edits)
        self.stats.host_seconds += time.perf_counter() - began
        if edits is not None and has_rows:
            if launcher.runner.may_be_interrupted:
                with interrupts.lifted():
                    logits = launcher.forward(self.order)
            else:
                interrupts.deliver()
                logits = launcher.forward(self.order)
            self._sample(edits, logits)
        depth = launcher.runner.depth if has_rows and tried is None else 1
        self._commit(depth - 1 if has_rows else 0)
        self._rest()
        self._suspects.passed(has_rows=has_rows)

    def _rest(self) -> None:
        """Where nothing runs, keep nothing of the last steps; what is in flight has ended."""
        if not self.scheduler.running:
            self.launcher.abandon()
            self.scheduler.forget_step()
            self.order.forget_chunks()

    def _apply(self, edits: Edits) -> bool:
        """Make the rows of the next step. Returns whether there are any."""
        for sequence, reason in edits.unfit:
            sequence.stop_reason = reason
            self._results.finish(sequence, "error")
        self.order.apply(edits)
        self._end_broken()
        if not self.launcher.follows(self.order):
            self._commit(0)
        return len(self.order.inputs.positions) > 0

    def _sample(self, edits: Edits, logits: Logits) -> None:
        """Sample the launched step's rows, and count the step."""
        self.scheduler.note_launched()
        self._results.note_launched(edits.chunks)
        self._save_modules(edits.chunks)
        if self.order.slots.masked:  # a grammar must have seen the tokens of the step before
            self._commit(0)
        self.launcher.sample(self.order, edits, logits)
        self._end_broken()
        stats, pool = self.stats, self.cache.pool
        stats.steps += 1
        stats.shared_read_tokens += self.order.shared_read_tokens
        stats.note_held(pool.num_held * pool.page_size)
        stats.num_preempted = self.scheduler.num_preempted
        stats.model_seconds += time.perf_counter() - self.launcher.began
        if self.trace is not None:
            self.trace.note(
                len(self.order.inputs.positions),
                edits.chunks,
                running=self.num_running,
                waiting=len(self.scheduler.waiting) + len(self._interactive),
                free_pages=pool.num_available,
            )

    def _commit(self, most: int) -> None:
        """Take the oldest steps in flight, until `most` are left."""
        while len(self.launcher.flights) > most:
            began = time.perf_counter()
            flight = self.launcher.flights[0]
            self._results.commit(flight)
            self.launcher.runner.check()
            self.launcher.flights.pop(0)
            self._note_time(flight)
            self.stats.sample_seconds += time.perf_counter() - began

    def _note_time(self, flight: Flight) -> None:
        before, self._committed_at = self._committed_at, time.perf_counter()
        seconds = self._committed_at - max(before, flight.began)
        kinds, self._kinds = self._kinds, (flight.edits.decodes > 0, flight.edits.jobs > 0)
        self.scheduler.note_step(flight.edits, seconds, is_steady=kinds == self._kinds)
        if self.tiers is not None:
            self.tiers.note_step(flight.edits.prompt_rows, seconds)

    def _end_broken(self) -> None:
        """End sequences that cannot be sampled."""
        broken, self.order.slots.broken = self.order.slots.broken, []
        for sequence, error in broken:
            if sequence.finish_reason is None:
                self._results.end_broken(sequence, error)

    # ----------------------------------------------------------------------------- weights

    @property
    def can_step(self) -> bool:
        """Whether a step may be computed: the engine is awake, and not paused."""
        return not self.is_paused and self.residence.is_ready

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int | None = None
    ) -> int:
        """Write other weights over the model's, in the same memory: some tensors or all, by their
        names in the checkpoint. Keys and values of the old ones are dropped; running requests go
        on with the new ones after the tokens that they have.

        Args:
            named_tensors: of any floating dtype and device; all are checked before one is written.
            version: what these weights are called; None: one more than the last.

        Returns:
            the version.

        Raises:
            WeightsError: names what is unknown, given twice, or of another shape.
            RequestError: the weights are asleep.
        """
        residence = self.residence
        tensors = residence.checked(named_tensors, version)
        self._let_go()
        residence.update(tensors, version)
        self._factory.weights_version = residence.version
        for state in self._states.values():
            for sequence in state.sequences:
                if sequence.finish_reason is None:
                    sequence.note_weights(residence.version)
        if self.tiers is not None:
            self.tiers.forget()
        return residence.version

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory: KV memory, and the weights, which go to host memory (level 1)
        or are dropped (2: `update_weights` has to give them again). Requests that run wait."""
        self._let_go()
        self.residence.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the memory again: of `weights`, `kv_cache`, or both."""
        self.residence.wake_up(tags)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Drop what is cached. Running requests keep what they read, unless these are to be
        computed again too. Returns whether nothing is left but pinned prefixes."""
        if reset_running_requests:
            self._let_go()
        else:
            self.cache.clear()
        return all(not run.pins or run in self.pins.runs for run in self.cache.runs())

    def _let_go(self) -> None:
        """Take what is in flight and drop all keys and values: running requests, and pinned
        prefixes, wait to be computed again."""
        try:
            with uninterrupted():
                self._commit(0)
        except Exception as error:
            self._contain(error)
        with uninterrupted():
            self.launcher.abandon()
            self.scheduler.preempt_all()
            self.order.clear()
            self._forget_ended()
            self.pins.let_go()
            self.cache.clear()

    # ----------------------------------------------------------------------------- errors

    def _contain(self, error: Exception) -> None:
        """End only requests that cause an error inside a step, if the device can go on."""
        scheduler, handled = self.scheduler, self.scheduler.handling
        involved = [handled] if handled is not None else list(scheduler.running)
        self._recover()
        if isinstance(error, SourceError):
            assert error.__cause__ is not None
            raise error.__cause__
        if _is_fatal(error):
            self.launcher.runner.check()
            raise error
        found = self._suspects.failed(involved)
        log.error(
            "a step failed; of %d requests, %d end", len(involved), len(found), exc_info=error
        )
        if self._suspects.is_hopeless and not found:
            raise error
        for sequence in found:
            self._results.end_broken(sequence, error)

    def _recover(self) -> None:
        """After any exception: drop what is in flight; rows are made anew from the sequences."""
        with uninterrupted():
            self.launcher.abandon()
            self.scheduler.recover()
            self.order.clear()

    def tell_ranks(self) -> None:
        """Give log-probabilities as `RankedLogprobs` from now on."""
        self._sampler.tells_ranks = True

    def keep_modules(self, *, host: HostStore | None, disk: DiskStore | None) -> None:
        """Keep computed modules of prompts in PML also in host memory, or on a disk."""
        if self.cache.enabled and (host is not None or disk is not None):
            self.tiers = self.scheduler.tiers = ModuleTiers(
                self.launcher.runner.kv_pages,
                host=host,
                disk=disk,
            )

    def _save_modules(self, chunks: list[Chunk]) -> None:
        if self.tiers is not None:
            for chunk in chunks:
                if chunk.module is not None and chunk.module.complete:
                    self.tiers.save(chunk.module)

    # ----------------------------------------------------------------------------- end

    def close(self) -> None:
        """Release threads and files; the engine cannot be used any more."""
        if self.tiers is not None:
            self.tiers.close()
        if self._grammars is not None:
            self._grammars.close()
        if self.trace is not None:
            self.trace.close()

    # ----------------------------------------------------------------------------- books

    def check(self) -> None:
        """Raise `CacheError` unless KV memory balances: free + cached == total."""
        self.cache.check()

    def reset_stats(self) -> None:
        """Count anew from here on; a trace begins anew."""
        self.stats.reset()
        self.scheduler.num_preempted = 0
        if self.trace is not None:
            self.trace.restart()


def check_counts(**counts: object) -> None:
    """Raise `ConfigError` for options that are not whole numbers of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}, expected an integer of at least 1")


def _is_fatal(error: Exception) -> bool:
    """Whether a device has failed, and nothing can be computed any more."""
    return isinstance(error, (torch.AcceleratorError, RankError)) or "CUDA error" in str(error)

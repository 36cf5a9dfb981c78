"""The engine: requests in, steps, outputs. One loop for chat, jobs and scoring."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable

import torch

from onestem.cache import PagePool, PrefixCache, StatePool
from onestem.cache.host import HostStore
from onestem.cache.storage import DiskStore
from onestem.engine.outputs import EngineStats, request_output
from onestem.engine.requests import Requests
from onestem.engine.sampling.sampler import Sampler
from onestem.engine.schedule.admission import model_len
from onestem.engine.schedule.answers import answer_memory_bytes
from onestem.engine.schedule.draft import StepDraft
from onestem.engine.schedule.pins import PrefixRequest
from onestem.engine.schedule.queue import PlannedQueue
from onestem.engine.schedule.scheduler import Scheduler
from onestem.engine.schedule.states import States, most_sequences
from onestem.engine.schedule.throttle import FEWEST_ROWS, CheckPace, StepLimits
from onestem.engine.schedule.waiting import SourceError
from onestem.engine.sequence import RequestState, StepChanges
from onestem.engine.step.batch_rows import BatchRows
from onestem.engine.step.launch import Launcher, make_runner, part_size
from onestem.engine.step.results import Results
from onestem.engine.step.runner import Logits, RankTeam, StepRunner
from onestem.engine.step.sequence_table import SequenceTable
from onestem.engine.step.suspects import Suspects
from onestem.engine.text.tokenizer import Tokenizer
from onestem.engine.tiers.tiers import KvTiers
from onestem.engine.trace import StepTrace
from onestem.engine.weights import Weights
from onestem.errors import RankError, RequestError
from onestem.garbage import collecting_less
from onestem.interrupts import Held, uninterrupted
from onestem.models.config import GenerationDefaults
from onestem.models.decoder import Decoder
from onestem.ops import resolve
from onestem.options import EngineOptions
from onestem.planner import Planned
from onestem.request import Request, RequestOutput

log = logging.getLogger(__name__)

# A step that can only wait for a grammar ends after this, to see what else has come.
GATE_SECONDS = 0.02
# Rows that a device multiplies while it reads the weights.
FREE_ROWS = {"cuda": 200}


class Engine:
    """Answers requests with one model.

    Args:
        tokenizer: None for a model without one: prompts are token ids and there is no text.
        defaults: the model's sampling defaults and end-of-sequence ids.
        num_pages: pages of KV memory (`options.kv_memory` is what they were counted from).
        num_states: slots for recurrent states, where layers keep some.
        team: the other processes that hold the model together; None: one device holds it.

    Attributes:
        options: as given, with lengths, answer memory and attention as the engine chose them.
        requests: those that are here; jobs and pinned prefixes too.
        weights: of the model; they are written, put to sleep and woken there.
        limits: of a step; `step_seconds` may be changed between steps.
        stats: what was computed since `reset_stats`.
        tiers: where keys and values are kept, beside KV memory.
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
        num_states: int = 0,
        team: RankTeam | None = None,
    ) -> None:
        config, page_size, share = decoder.config, options.page_size, options.share
        limit, kv_tokens = config.max_position_embeddings, num_pages * page_size
        impl = resolve(
            options.impl,
            decoder.device,
            heads=decoder.part.head_shapes,
            deterministic=options.deterministic,
        )
        step_tokens = options.max_step_tokens or decoder.step_rows
        self.options = options.replace(
            max_model_len=model_len(limit, kv_tokens, options.max_model_len),
            max_step_tokens=step_tokens,
            answer_memory=answer_memory_bytes(options.answer_memory),
            impl=impl.name,
        )
        self.stats = EngineStats()
        self.team = team
        states = None if config.delta is None else StatePool(num_states)
        own = {} if states is None else {"num_states": num_states}
        runner: StepRunner = (make_runner if team is None else team.make_runner)(
            decoder, impl, num_pages=num_pages, page_size=page_size, share=share, **own
        )
        self.cache = PrefixCache(
            PagePool(num_pages, page_size, part_size(impl, decoder, page_size)),
            enabled=share != "off",
            states=states,
        )
        sampler = Sampler(
            config.vocab_size, defaults, decoder.device, logprobs_mode=options.logprobs_mode
        )
        if decoder.device.type == "cuda":
            sampler.warm_up()
        eos = defaults.ends(() if tokenizer is None else tokenizer.end_ids, config.vocab_size)
        self.weights = Weights(
            decoder, runner, self._release, lambda version: self.requests.note_weights(version)
        )
        self.requests = Requests(
            self.weights,
            tokenizer,
            self.options,
            self.cache,
            sampler,
            self.stats,
            eos=eos,
            end=self._end,
            scheduler=lambda: self.scheduler,
        )
        self.limits = StepLimits(
            step_tokens=step_tokens,
            step_seconds=options.max_step_ms / 1000 if options.max_step_ms else None,
        )
        self.scheduler = Scheduler(
            self.cache,
            self.requests.queue,
            self.requests.factory,
            self.requests.pins,
            limits=self.limits,
            max_num_seqs=most_sequences(options.max_num_seqs, states),
            states=None if states is None else States(self.cache, states, runner.depth > 1),
            free_rows=FREE_ROWS.get(decoder.device.type, FEWEST_ROWS),
            answers=self.requests.answers,
        )
        table = SequenceTable(sampler, eos)
        self.batch_rows = BatchRows(
            self.cache, table, windows=runner.windows, share=share != "storage"
        )
        self.launcher = Launcher(runner, sampler)
        self.results = Results(self.scheduler, table, sampler, eos, self.stats)
        self._suspects = Suspects()
        self._checks = CheckPace()
        self.trace: StepTrace | None = None
        self.tiers: KvTiers | None = None  # see `keep_below`
        self.is_paused = False

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
        self.requests.add(request, key, weight)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its pages are free at once. None if it is not here."""
        return self.requests.abort(request_id)

    def _end(self, state: RequestState) -> RequestOutput:
        """End a request that is open."""
        for sequence in list(state.sequences):
            if sequence.finish_reason is None:
                with uninterrupted():
                    self.results.finish(sequence, "abort")
        self._rest()
        self.requests.forget(self.results.take_ended())
        self.results.touched.pop(state, None)
        output = request_output(state)
        state.let_go()
        return output

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and answer."""
        assert self.options.max_model_len is not None
        return self.options.max_model_len

    @property
    def num_waiting(self) -> int:
        """Interactive requests that are not admitted, and their sequences that were preempted."""
        back = sum(not sequence.is_job for sequence in self.scheduler.waiting)
        return len(self.requests.queue.interactive) + back

    @property
    def num_running(self) -> int:
        """Sequences that are admitted."""
        return self.scheduler.room.num_running

    def has_unfinished(self) -> bool:
        """Whether a step has something to do. An engine that falls idle calls `check` now and
        then."""
        requests = self.requests
        if requests.queue.holds or self.results.touched or requests.factory.refused:
            return True
        if not self.scheduler.idle():
            return True
        self._checks.call(self.check, self.scheduler.step)
        if self.tiers is not None:
            self.tiers.prefixes.save_idle()
        return False

    def run(self, requests: Iterable[Request]) -> Generator[RequestOutput]:
        """Answer requests in the given order, read as there is room for them; yield each as it
        finishes, and those that stream as they grow. Requests of a planned group must follow each
        other. Whatever is unfinished when the iterator is closed is aborted.

        Raises:
            RequestError: the engine has other requests, or was put to sleep; or, when it is read, a
                request that can never be answered.
        """
        ours, waiting, states = self.requests, self.scheduler.waiting, self.requests.states
        self.weights.check_ready()
        others = states or ours.queue.holds or ours.queue.peek() is not None
        if others or waiting.queue is not ours.queue:
            raise RequestError(
                "the engine has unfinished requests: let them end first, or use another engine"
            )
        if isinstance(requests, Planned):
            requests.has_branches = self.cache.states is not None
        waiting.queue = PlannedQueue(map(ours.validated, ours.read_ahead(requests)))
        try:
            with collecting_less():
                while self.has_unfinished():
                    self.weights.check_ready()
                    yield from self.step()
        finally:
            with uninterrupted():
                for request_id in list(states):
                    self.abort(request_id)
                waiting.queue = ours.queue
                self.scheduler.end_plans()
                ours.factory.arrivals.clear()
                self.results.touched.clear()

    def step(self) -> list[RequestOutput]:
        """Compute one step; outputs of requests that finished in it or that stream."""
        outputs, going_on = self.step_news()
        return outputs + [request_output(state) for state in going_on]

    def step_news(self) -> tuple[list[RequestOutput], list[RequestState]]:
        """`step` for a caller that streams: outputs of requests that finished, and states of
        streaming requests that have news and go on."""
        requests, factory = self.requests, self.requests.factory
        if requests.queue.holds and not requests.states and requests.queue.peek() is None:
            factory.wait(GATE_SECONDS)
        draft = StepDraft(may_preempt=not self.launcher.in_flight, only=self._suspects.tried)
        with uninterrupted() as interrupts:
            try:
                if self.can_step:
                    self._step(draft, interrupts)
            except BaseException as error:
                if not isinstance(error, Exception) or error is interrupts.raised:
                    self._recover(draft)  # Ctrl-C, or what another signal's handler raised
                    raise
                self._contain(error, draft)
        requests.forget(self.results.take_ended())
        touched, self.results.touched = self.results.touched, {}
        outputs, factory.refused = factory.refused, []
        going_on = []
        for state in touched:
            is_asked_for = not isinstance(state.request, PrefixRequest)
            if state.finished:
                outputs += [request_output(state)] if is_asked_for else []
                state.let_go()
            elif state.request.stream and is_asked_for:
                going_on.append(state)
        return outputs, going_on

    def _step(self, draft: StepDraft, interrupts: Held) -> None:
        """Decide the next step, launch it, and take what the one before gave (on a CPU: what it
        gave itself)."""
        launcher = self.launcher
        began = time.perf_counter()
        self.scheduler.decide(draft, self.batch_rows)
        if self.tiers is not None:
            self.tiers.prefixes.save_evicted()
        if draft.opened:
            self.requests.on_begin(draft.opened)
        has_rows = not draft.waits and self._apply(draft.changes)
        self.stats.host_seconds += time.perf_counter() - began
        if has_rows:
            if launcher.runner.may_be_interrupted:
                with interrupts.lifted():
                    logits = launcher.forward(self.batch_rows)
            else:
                interrupts.deliver()
                logits = launcher.forward(self.batch_rows)
            self._sample(draft, logits)
        depth = launcher.runner.depth if has_rows and draft.only is None else 1
        self._commit(depth - 1 if has_rows else 0)
        self._rest()
        self._suspects.passed(has_rows=has_rows)

    def _rest(self) -> None:
        """Where nothing runs, keep nothing of the last steps; what is in flight has ended."""
        if not self.num_running:
            self.launcher.abandon()
            self.scheduler.waiting.forget_short()
            self.batch_rows.forget_chunks()

    def _apply(self, changes: StepChanges) -> bool:
        """Make the rows of the next step. Returns whether there are any."""
        self.results.end_unfit(changes.unfit)
        self.batch_rows.apply(changes)
        self.results.end_unsampled()
        if not self.launcher.follows(self.batch_rows):
            self._commit(0)
        return len(self.batch_rows.inputs.positions) > 0

    def _sample(self, draft: StepDraft, logits: Logits) -> None:
        """Sample the launched step's rows, and count the step."""
        changes = draft.changes
        draft.is_launched = True
        self.results.note_launched(changes.chunks)
        if self.batch_rows.table.masked:  # a grammar must have seen the tokens of the step before
            self._commit(0)
        self.launcher.sample(self.batch_rows, changes, logits)
        if self.tiers is not None:  # other ranks take no messages before all logits are made
            self.tiers.note_launched(changes.chunks)
        self.results.end_unsampled()
        stats, pool = self.stats, self.cache.pool
        stats.steps += 1
        stats.shared_read_tokens += self.batch_rows.shared_read_tokens
        stats.peak_kv_tokens = max(stats.peak_kv_tokens, pool.num_held * pool.page_size)
        stats.num_preempted = self.scheduler.room.num_preempted
        stats.model_seconds += time.perf_counter() - self.launcher.began
        if self.trace is not None:
            self.trace.note(
                len(self.batch_rows.inputs.positions),
                changes.chunks,
                running=self.num_running,
                waiting=len(self.scheduler.waiting) + len(self.requests.queue.interactive),
                free_pages=pool.num_available,
            )

    def _commit(self, most: int) -> None:
        """Take the oldest steps in flight, until `most` are left."""
        while len(self.launcher.in_flight) > most:
            began = time.perf_counter()
            step = self.launcher.in_flight[0]
            self.results.commit(step)
            self.launcher.runner.check()
            self.launcher.in_flight.pop(0)
            ended = time.perf_counter()
            seconds = self.scheduler.note_step(step.changes, step.began, ended)
            if self.tiers is not None:
                self.tiers.stores.rates.note_step(step.changes.prompt_rows, seconds)
            self.stats.sample_seconds += time.perf_counter() - began

    @property
    def can_step(self) -> bool:
        """Whether a step may be computed: the engine is awake, and not paused."""
        return not self.is_paused and self.weights.is_ready

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Drop what is cached. Running requests keep what they read, unless these are to be
        computed again too. Returns whether nothing is left but pinned prefixes."""
        if reset_running_requests:
            self._release()
        else:
            self.cache.clear()
        return all(not run.pins or run in self.requests.pins.runs for run in self.cache.runs())

    def _release(self) -> None:
        """Take what is in flight and drop all keys and values: running requests, and pinned
        prefixes, wait to be computed again."""
        try:
            with uninterrupted():
                self._commit(0)
        except Exception as error:
            self._contain(error, StepDraft())
        with uninterrupted():
            self.launcher.abandon()
            self.scheduler.room.preempt_all()
            if self.tiers is not None:  # what this, or a step that failed, has evicted
                self.tiers.prefixes.save_evicted()
            self.batch_rows.clear()
            self.requests.forget(self.results.take_ended())
            self.requests.pins.let_go()
            self.cache.clear()

    def _contain(self, error: Exception, draft: StepDraft) -> None:
        """End only requests that cause an error inside a step, if the device can go on."""
        involved = self.scheduler.running if draft.handling is None else [draft.handling]
        self._recover(draft)
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
            self.results.end_broken(sequence, error)

    def _recover(self, draft: StepDraft) -> None:
        """After any exception: drop what is in flight; rows are rebuilt from the sequences."""
        with uninterrupted():
            self.launcher.abandon()
            self.scheduler.recover(draft)
            self.batch_rows.clear()
            self.results.end_unfit(draft.changes.unfit)

    def keep_below(self, identity: str, *, host: HostStore | None, disk: DiskStore | None) -> None:
        """Keep keys and values also in host memory, or on a disk. `identity`: what they depend on
        besides tokens and labels. Of several ranks, `host` is what each of them takes."""
        if self.cache.enabled and (host is not None or disk is not None):
            budget = 0 if host is None else host.budget
            copies = self.launcher.runner.kv_copies(budget, disk)
            tiers = KvTiers.make(copies, self.cache, identity, host=host, disk=disk)
            self.tiers = self.requests.factory.tiers = self.scheduler.chunks.tiers = tiers
            self.scheduler.room.on_leave = tiers.prefixes.leave

    def close(self, seconds: float = float("inf")) -> None:
        """Release threads and files; the engine cannot be used any more. `seconds`: how long what
        a restart would lose may be written to the disk."""
        if self.tiers is not None:
            self.tiers.close(seconds)
        if self.requests.grammars is not None:
            self.requests.grammars.close()
        if self.trace is not None:
            self.trace.close()

    def check(self) -> None:
        """Raise `CacheError` unless KV memory balances: free + cached == total; and so do slots of
        recurrent states."""
        self.cache.check()
        if self.cache.states is not None:
            running = (one.state_slot for one in self.scheduler.running)
            held = [one.slot for one in running if one is not None]
            self.cache.states.check(self.cache.runs(), held)

    def reset_stats(self) -> None:
        """Count from 0 again; a trace begins again."""
        self.stats.reset()
        self.scheduler.room.num_preempted = 0
        if self.trace is not None:
            self.trace.restart()


def _is_fatal(error: Exception) -> bool:
    """Whether a device has failed, and nothing can be computed any more."""
    return isinstance(error, (torch.AcceleratorError, RankError)) or "CUDA error" in str(error)

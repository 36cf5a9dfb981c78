"""The engine: requests in, steps, outputs. One loop for chat, jobs and scoring."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from onestem.cache import PagePool, PrefixCache
from onestem.cache.storage import DiskStore, HostStore
from onestem.engine.admission import check_pml, check_request, longest_choice
from onestem.engine.grammar import GrammarCompiler
from onestem.engine.inputs import StepInputs, build_inputs
from onestem.engine.interrupts import uninterrupted
from onestem.engine.jobs import Jobs
from onestem.engine.opening import Opening
from onestem.engine.outputs import aborted_output, refused_output, request_output
from onestem.engine.pins import PinnedPrefixes, PrefixInfo, PrefixRequest, prefix_id
from onestem.engine.queue import Gate, HybridQueue, PlannedQueue
from onestem.engine.results import Results
from onestem.engine.reuse import explain
from onestem.engine.runner import Runner, ShareMode
from onestem.engine.sampler import Sampler
from onestem.engine.scheduler import Chunk, Scheduler
from onestem.engine.sequence import RequestState, Sequence
from onestem.engine.snapshot import snapshot
from onestem.engine.stats import EngineStats
from onestem.engine.streaks import Streaks
from onestem.engine.tiers import ModuleTiers
from onestem.engine.tokenizer import Tokenizer
from onestem.errors import ConfigError, RequestError, UnsupportedError
from onestem.models.config import GenerationDefaults
from onestem.models.decoder import Decoder
from onestem.ops import AttentionImpl, resolve
from onestem.pml import EncodedSegment, Segment
from onestem.request import FinishReason, Request, RequestOutput

__all__ = ["Engine", "EngineStats", "check_counts"]

log = logging.getLogger(__name__)

# A step that can only wait for a grammar ends after this, to see who else has come.
GATE_SECONDS = 0.02
CHECK_SHARE = 0.001  # of the time may go into checking books


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
        max_step_tokens: most rows of a step, half of them for prompts at least.
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
        check_counts(page_size=page_size, num_pages=num_pages, max_step_tokens=max_step_tokens)
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
        self._queue = HybridQueue(self._gate)
        self._fifo = self._queue.interactive
        self.scheduler = Scheduler(
            self.cache,
            self._queue,
            self._open,
            max_step_tokens=max_step_tokens,
            max_step_seconds=max_step_seconds,
        )
        self.scheduler.on_admitted = self._note_admitted
        self.scheduler.on_unfit = self._end_unfit
        self.scheduler.let_pins_go = self._let_pins_go
        self.pins = PinnedPrefixes(
            self.cache,
            max_model_len=self.max_model_len,
            bytes_per_token=decoder.kv_bytes_per_token,
        )
        self._jobs = Jobs()
        self._refused: list[RequestOutput] = []  # requests of jobs that can never be answered
        self._sampler = Sampler(decoder.config.vocab_size, defaults, decoder.device)
        eos = _known_eos(defaults.eos_token_ids, decoder.config.vocab_size)
        if decoder.device.type == "cuda":
            self._sampler.warm_up()
        self._grammars = (
            GrammarCompiler(tokenizer, decoder.config.vocab_size, eos or None)
            if tokenizer
            else None
        )
        self._opening = Opening(
            decoder.config,
            self.cache.pool,
            kept_pages=lambda: self.pins.num_pages,
            tokenizer=tokenizer,
            grammars=self._grammars,
            max_model_len=self.max_model_len,
            together=share != "off",
            seed=seed,
        )
        self._results = Results(
            scheduler=self.scheduler,
            sampler=self._sampler,
            tokenizer=tokenizer,
            eos_token_ids=eos,
            stats=self.stats,
            new_sequence=self._opening.sequence,
            on_finished=self._note_finished,
        )
        self._streaks = Streaks(
            self.cache,
            self.scheduler,
            self._runner,
            self._sampler,
            self._results,
            self.stats,
            eos_token_ids=eos,
            share=share != "storage",
        )
        self._states: dict[str, RequestState] = {}
        self._runs_a_job = False
        self.tiers: ModuleTiers | None = None  # see `keep_modules`
        self._checked_at = 0
        self._check_from = 0.0

    # ----------------------------------------------------------------------------- requests

    def validate(self, request: Request, token_ids: NDArray[np.integer] | None = None) -> None:
        """Raise `RequestError` for a request that can never be answered. Compiles its grammar, so
        call it from a thread that nobody waits for. `token_ids`: those of the prompt, where an
        array of them is there."""
        self._check(request, token_ids)
        self._compile(request)

    def _compile(self, request: Request) -> None:
        if self._grammars is not None:
            _refuse_unsupported(self._grammars.compile, request)

    def _check(self, request: Request, token_ids: NDArray[np.integer] | None = None) -> None:
        check_request(
            request,
            max_model_len=self.max_model_len,
            vocab_size=self.decoder.config.vocab_size,
            tokenizer=self.tokenizer,
            token_ids=token_ids,
        )
        self._sampler.settings_of(request.params)
        if self._grammars is not None:
            _refuse_unsupported(self._grammars.check, request)
        if request.pml is not None:
            pool = self.cache.pool
            check_pml(
                request.pml,
                self.decoder.config,
                num_pages=pool.num_pages - self.pins.num_pages,
                page_size=pool.page_size,
                answer_tokens=longest_choice(request, self.tokenizer) or 1,
            )

    def add_request(self, request: Request) -> None:
        """Queue a request; its outputs come from `step`. One with a grammar that is not compiled
        yet waits until a thread has done so; others pass it. If it cannot be compiled, the request
        comes back as an error.

        Raises:
            RequestError: it can never be answered.
        """
        self._admissible(request)
        self._fifo.push(request)

    def _gate(self, request: Request) -> Gate:
        """A grammar that no thread has compiled yet delays its request, and nobody else."""
        answer, reason = self._opening.gate(request)
        if answer is Gate.REFUSE:
            self._opening.forget(request.request_id)
            self._jobs.ended(request.request_id)
            self._refused.append(refused_output(request, reason))
        return answer

    def _prefetch(self, request: Request) -> None:
        """Have modules that the request will read copied nearer while it waits."""
        if self.tiers is not None and request.pml is not None:
            self.prefetch_modules(
                [s for s in request.pml.segments if s.kind == "cached"], request.module_salt
            )

    def prefetch_modules(
        self, segments: Iterable[Segment | EncodedSegment], cache_salt: str = ""
    ) -> None:
        """Read modules that may soon be wanted from the disk, as far as they are there alone."""
        if self.tiers is not None:
            store = self.cache.modules
            self.tiers.prefetch(
                ((cache_salt, segment.key), len(segment.token_ids))
                for segment in segments
                if store.get((cache_salt, segment.key, None)) is None
            )

    def _check_id(self, request: Request) -> None:
        here = (self._states, self._opening.arrivals, self._fifo)
        if any(request.request_id in each for each in here):
            raise RequestError(
                f"request id {request.request_id!r} is in use: give each request its own"
            )

    def add_job(self, job_id: str, requests: Iterable[Request]) -> None:
        """Queue a job behind those that are here: its requests (in planned order, read as there is
        room) run in what interactive requests leave free. One that can never be answered comes back
        from `step` as an error. An exception of the iterator comes out of `step`, and the next step
        reads on.

        Raises:
            RequestError: the engine has a job of this name that has not ended.
        """
        self._jobs.unfinished(self._queue.job_ids)
        self._jobs.add(job_id)
        # Not a generator, which would end with the first error that it passes on.
        self._queue.add_job(job_id, filter(None, map(partial(self._of_job, job_id), requests)))

    def _of_job(self, job_id: str, request: Request) -> Request | None:
        try:
            self._admissible(request)
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
            self._opening.forget(request_id)
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
            self.add_request(request)
        except RequestError:
            self.pins.remove(name)
            raise

    def unpin_prefix(self, name: str) -> None:
        """Let a prefix go: it stays cached until its memory is wanted."""
        if not self.pins.remove(name):
            self.abort(prefix_id(name))
        self.scheduler.is_short = False

    def prefixes(self) -> list[PrefixInfo]:
        """The pinned prefixes."""
        return self.pins.infos(self.scheduler.running, self.scheduler.version)

    def snapshot(self) -> dict[str, Any]:
        """The state in plain values (`onestem.engine.snapshot`)."""
        return snapshot(self)

    @property
    def num_waiting(self) -> int:
        """Interactive requests that are not admitted, and their sequences that were set back."""
        back = sum(not sequence.is_job for sequence in self.scheduler.waiting)
        return len(self._fifo) + back

    @property
    def num_running(self) -> int:
        """Sequences that are admitted."""
        return len(self.scheduler.running)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its pages are free at once. None if it is not here."""
        waiting = self._fifo.remove(request_id)
        if waiting is not None:
            self._opening.forget(request_id)
            return aborted_output(waiting)
        state = self._states.get(request_id)
        if state is None:
            return None
        for sequence in list(state.sequences):
            if sequence.finish_reason is None:
                self._streaks.abort(sequence)
        self._results.touched.pop(state, None)
        return request_output(state)

    def has_unfinished(self) -> bool:
        """Whether a step has something to do. An engine that falls idle checks its books now and
        then."""
        if self._queue.holds or self._results.touched or self._refused:
            return True
        if not self.scheduler.idle():
            return True
        self._check_now_and_then()
        return False

    def _check_now_and_then(self) -> None:
        """Recounting many runs takes long, and the next request may come any moment."""
        started = time.monotonic()
        if self._checked_at != self.scheduler.step and started >= self._check_from:
            self._checked_at = self.scheduler.step
            self.check()
            ended = time.monotonic()
            self._check_from = ended + (ended - started) / CHECK_SHARE

    def run(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Answer requests in the given order, read as there is room for them; yield each as it
        finishes. Requests of a planned group must follow each other. Whatever is unfinished when
        the iterator is closed is aborted.

        Raises:
            RequestError: the engine has other requests; or, when it is read, a request that can
                never be answered.
        """
        if self._runs_a_job or self._states or self._has_waiting():
            raise RequestError(
                "the engine has unfinished requests: let them end first, or use another engine"
            )
        self._runs_a_job = True
        self.scheduler.queue = PlannedQueue(map(self._validated, requests))
        try:
            while self.has_unfinished():
                yield from (output for output in self.step() if output.finished)
        finally:
            with uninterrupted():
                for request_id in list(self._states):
                    self.abort(request_id)
                self.scheduler.queue = self._queue
                self.scheduler.groups.release_all()
                self._opening.arrivals.clear()
                self._results.touched.clear()
                self._runs_a_job = False

    def _has_waiting(self) -> bool:
        return self._queue.peek() is not None or self._queue.holds

    def _validated(self, request: Request) -> Request:
        self._admissible(request)
        self._compile(request)
        return request

    def _admissible(self, request: Request) -> None:
        """All of `validate` but its grammar, for which it waits at the gate."""
        self._check_id(request)
        self._check(request)
        self._prefetch(request)
        self._opening.arrivals[request.request_id] = time.monotonic()

    def _open(self, request: Request) -> list[Sequence]:
        state = self._opening.open(request)
        self._states[request.request_id] = state
        self.stats.requests += 1
        self.stats.logical_prompt_tokens += len(request.prompt_token_ids) * max(
            len(state.sequences), request.params.n
        )
        return list(state.sequences)

    def _note_admitted(self, sequence: Sequence) -> None:
        path = sequence.path(self.scheduler.version)
        prefix = self.pins.admitted(sequence, path)
        if self.cache.enabled and sequence.state.reuse is None:
            sequence.state.reuse = explain(sequence, path, prefix)

    def _end_unfit(self, sequence: Sequence, reason: str) -> None:
        sequence.stop_reason = reason
        self._results.finish(sequence, "error")

    def _let_pins_go(self) -> bool:
        """Pinned prefixes make room, and are computed again behind who waits; False: none did."""
        requests = self.pins.let_go()
        for request in requests:
            self._fifo.push(request)
        return bool(requests)

    def _note_finished(self, state: RequestState, reason: FinishReason) -> None:
        request = state.request
        del self._states[request.request_id]
        self._jobs.ended(request.request_id)
        if isinstance(request, PrefixRequest) and reason != "abort":
            self.pins.computed(request)

    # ----------------------------------------------------------------------------- a step

    def step(self) -> list[RequestOutput]:
        """Compute one step; outputs of requests that finished in it or that stream."""
        outputs, going_on = self.step_news()
        return outputs + [request_output(state) for state in going_on]

    def step_news(self) -> tuple[list[RequestOutput], list[RequestState]]:
        """`step` for who hands tokens on as they come: outputs of requests that finished, and the
        states of those that stream, have news and go on."""
        if self._queue.holds and not self._states and self._queue.peek() is None:
            self._opening.wait(GATE_SECONDS)
        if not self._streaks.step():
            self._scheduled_step()
        touched, self._results.touched = self._results.touched, {}
        outputs, self._refused = self._refused, []
        going_on = []
        for state in touched:
            if isinstance(state.request, PrefixRequest):
                continue
            if state.finished:
                outputs.append(request_output(state))
            elif state.request.stream:
                going_on.append(state)
        return outputs, going_on

    def _scheduled_step(self) -> None:
        started = time.perf_counter()
        was_computed = False
        try:
            with uninterrupted():
                chunks = self.scheduler.schedule()
                if not chunks:
                    return
                pool = self.cache.pool
                self.stats.note_held(pool.num_held * pool.page_size)
                self._results.note_scheduled(chunks)
                inputs, prepared = self._build(chunks)
            built = time.perf_counter()
            logits = self._runner.run(inputs, prepared)
            with uninterrupted():
                was_computed = True
                computed = time.perf_counter()
                self._commit(chunks, inputs, logits)
        except BaseException:
            # Ctrl-C, or memory. What was scheduled and not computed has no KV, and nobody may take
            # it for computed; of what was computed (on a GPU it is waited for by the commit) some
            # results may not have been taken.
            (self.scheduler.retake if was_computed else self.scheduler.undo)()
            raise
        self._save_modules(chunks)
        ended = time.perf_counter()
        self.scheduler.note_step(ended - started)
        if self.tiers is not None and inputs.wanted:  # else a GPU was not waited for
            self.tiers.note_step(sum(c.num_prompt_rows for c in chunks), ended - started)
        self._count(built - started, computed - built, ended - computed)
        self._streaks.begin()

    def _build(self, chunks: list[Chunk]) -> tuple[StepInputs, Any]:
        inputs = build_inputs(
            chunks,
            page_size=self.cache.pool.page_size,
            windows=self._runner.windows,
            version=self.scheduler.version,
            share=self.share != "storage",
        )
        return inputs, self._runner.prepare(inputs)

    def keep_modules(self, *, host: HostStore | None, disk: DiskStore | None) -> None:
        """Keep computed modules of prompts in PML also in host memory, or on a disk."""
        if self.cache.enabled and (host is not None or disk is not None):
            self.tiers = self.scheduler.tiers = ModuleTiers(
                self._runner.pages,
                host=host,
                disk=disk,
            )

    def _save_modules(self, chunks: list[Chunk]) -> None:
        if self.tiers is not None:
            for chunk in chunks:
                if chunk.module is not None and chunk.module.complete:
                    self.tiers.save(chunk.module)

    def _count(self, host: float, model: float, sample: float) -> None:
        stats = self.stats
        stats.steps += 1
        stats.host_seconds += host
        stats.model_seconds += model
        stats.sample_seconds += sample
        stats.set_backs = self.scheduler.num_set_backs

    def _commit(self, chunks: list[Chunk], inputs: StepInputs, logits: Tensor) -> None:
        """Take the step's results."""
        self._results.note_computed(chunks)
        self.stats.shared_read_tokens += inputs.shared_read_tokens
        self._results.score(inputs.wanted, logits)
        self._results.sample(inputs.wanted, logits)

    # ----------------------------------------------------------------------------- end

    def close(self) -> None:
        """Let go of threads and files; the engine cannot be used any more."""
        if self.tiers is not None:
            self.tiers.close()
        if self._grammars is not None:
            self._grammars.close()

    # ----------------------------------------------------------------------------- books

    def check(self) -> None:
        """Raise `CacheError` unless KV memory balances: free + cached == total."""
        self.cache.check()

    def reset_stats(self) -> None:
        self.stats.reset()
        self.scheduler.num_set_backs = 0


def check_counts(**counts: object) -> None:
    """Raise `ConfigError` for options that are not whole numbers of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}, expected an integer of at least 1")


def _known_eos(token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Those that the model can sample."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            log.warning("eos_token_id %d is not among the model's %d tokens", token, vocab_size)
    return tuple(token for token in token_ids if 0 <= token < vocab_size)


def _refuse_unsupported(check: Callable[..., object], request: Request) -> None:
    """Check a request's `response_format`: what is not supported is a fault of the request."""
    try:
        check(request.params.response_format)
    except UnsupportedError as error:
        raise RequestError(str(error)) from error


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


def _model_len(decoder: Decoder, capacity: int, asked: int | None) -> int:
    limit = decoder.config.max_position_embeddings
    if asked is None:
        # Where memory is what limits, a round figure: the next start finds a little more or less
        # free, and a job that goes on must find the same limit.
        return limit if limit <= capacity else capacity - capacity % 1024 or capacity
    check_counts(max_model_len=asked)
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

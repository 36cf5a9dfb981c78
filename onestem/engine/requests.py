"""Requests in the engine: what is let in, what waits, and what each is called."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from concurrent.futures import Future, wait
from functools import partial

from torch import Tensor

from onestem.cache import PrefixCache
from onestem.engine.grammar.compiler import GrammarCompiler
from onestem.engine.grammar.state import Grammar
from onestem.engine.modules.prompt import place_of, run_name
from onestem.engine.outputs import EngineStats, refused_output, unbegun_output
from onestem.engine.sampling.sampler import Sampler
from onestem.engine.schedule.admission import (
    SequenceFactory,
    check_format,
    check_pml,
    check_request,
)
from onestem.engine.schedule.answers import AnswerLimit, AnswerMemory, answer_memory_bytes
from onestem.engine.schedule.pins import (
    PREFIXES,
    PinnedPrefixes,
    PrefixInfo,
    PrefixRequest,
    prefix_id,
)
from onestem.engine.schedule.queue import HybridQueue
from onestem.engine.schedule.scheduler import Scheduler
from onestem.engine.sequence import RequestState
from onestem.engine.text.tokenizer import Tokenizer
from onestem.engine.weights import Weights
from onestem.errors import RequestError
from onestem.options import EngineOptions
from onestem.pml import Segment
from onestem.request import Request, RequestOutput


class Requests:
    """Interactive requests, jobs and pinned prefixes, from the door until they have ended.

    Args:
        weights, cache, sampler, stats: the engine's; weights must be awake.
        options: the engine's, settled.
        eos: tokens that end a sequence.
        end: ends a request that is open.
        scheduler: the engine's, once it is made.

    Attributes:
        tokenizer: None for a model without one.
        on_begin: called with ids of interactive requests before the first step that they are in.
        queue: those that are not admitted.
        factory: makes their sequences.
        grammars: compiles theirs; None for a model without a tokenizer.
        pins: prefixes that are kept.
        answers: host memory that answers may take.
    """

    def __init__(
        self,
        weights: Weights,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        cache: PrefixCache,
        sampler: Sampler,
        stats: EngineStats,
        *,
        eos: tuple[int, ...],
        end: Callable[[RequestState], RequestOutput],
        scheduler: Callable[[], Scheduler],
    ) -> None:
        config, limit = weights.decoder.config, options.max_model_len
        assert limit is not None
        self.tokenizer = tokenizer
        self.on_begin: Callable[[list[str]], object] = lambda request_ids: None
        self.grammars = (
            GrammarCompiler(tokenizer, config.vocab_size, eos or None) if tokenizer else None
        )
        self.factory = SequenceFactory(
            config=config,
            pool=cache.pool,
            kept_pages=lambda: self.pins.num_pages,
            tokenizer=tokenizer,
            grammars=self.grammars,
            max_model_len=limit,
            together=options.share != "off",
            seed=options.seed,
            stats=stats,
        )
        self.factory.on_forgotten = lambda request_id: self._job_of.pop(request_id, None)
        self.queue = HybridQueue(cache.tree, options.max_passed, self.factory.gate)
        self.pins = PinnedPrefixes(
            cache,
            self.queue.interactive,
            max_model_len=limit,
            bytes_per_token=weights.decoder.kv_bytes_per_token,
        )
        pool = cache.pool
        kv_tokens = pool.num_pages * pool.page_size
        most = answer_memory_bytes(options.answer_memory)
        self.answers = AnswerMemory(
            AnswerLimit(most=most, max_model_len=limit, kv_tokens=kv_tokens)
        )
        self._check_length = partial(
            check_request,
            max_model_len=limit,
            vocab_size=config.vocab_size,
            tokenizer=tokenizer,
            max_num_seqs=options.max_num_seqs,
            answers=self.answers.limit,
        )
        self._check_pml = partial(
            check_pml,
            config=config,
            tokenizer=tokenizer,
            page_size=pool.page_size,
            deterministic=options.deterministic,
            ranks=options.tensor_parallel_size,
            private=not self.factory.together,
        )
        # Of requests that were read and have not ended, by id.
        self._job_of: dict[str, str] = {}
        self._cache = cache
        self._sampler = sampler
        self._weights = weights
        self._end = end
        self._scheduler = scheduler

    @property
    def states(self) -> dict[str, RequestState]:
        """Of requests that are open, by id."""
        return self.factory.states

    def validate(self, request: Request) -> None:
        """Raise `RequestError` for a request that can never be answered. Compiles its grammar, so
        call it from a thread that nothing waits for."""
        self._check(request)
        if self.grammars is not None:
            check_format(self.grammars.compile, request)

    def prepare(
        self, request: Request, key: str = "", weight: float = 1.0
    ) -> Future[Grammar] | None:
        """`validate`, but without waiting for the grammar: what is wrong with the format is the
        future's exception; see `GrammarCompiler.prepare`. None: the request has no grammar. May be
        called from any thread."""
        self._check(request)
        if self.grammars is None:
            return None
        return self.grammars.prepare(request.params.response_format, key, weight)

    def _check(self, request: Request) -> None:
        self._check_length(request)
        states = self._cache.states
        if states is not None and request.params.n > states.most_sequences:
            raise RequestError(
                f"n is {request.params.n}, and KV memory has recurrent states for "
                f"{states.most_sequences} sequences: lower n or raise kv_memory"
            )
        self._sampler.settings_of(request.params)
        self._check_pml(request, num_pages=self._cache.pool.num_pages - self.pins.num_pages)

    def admissible(self, request: Request) -> None:
        """Note the arrival of a request. Checks all of `validate` but the grammar, for which it
        waits at the gate.

        Raises:
            RequestError: it can never be answered, or its id is in use.
        """
        self._weights.check_ready()
        here = (self.states, self.factory.arrivals, self.queue.interactive)
        if any(request.request_id in each for each in here):
            raise RequestError(
                f"request id {request.request_id!r} is in use: give each request its own"
            )
        self._check(request)
        if self.grammars is not None:
            check_format(self.grammars.check, request)
        if request.pml is not None:
            segments = (s for s in request.pml.segments if s.kind == "cached")
            self.prefetch_modules(segments, request.module_salt)
        self.factory.arrivals[request.request_id] = time.monotonic()

    def add(self, request: Request, key: str = "", weight: float = 1.0) -> None:
        """Queue a request (`Engine.add_request`)."""
        self.admissible(request)
        self.queue.interactive.push(request, key, weight)

    def validated(self, request: Request) -> Request:
        """A request that is `admissible`, whose grammar is compiled."""
        self.admissible(request)
        if self.grammars is not None:
            check_format(self.grammars.compile, request)
        if self.factory.tiers is not None:
            wait(self.factory.tiers.prefixes.read(request))
        return request

    def read_ahead(self, requests: Iterable[Request]) -> Iterable[Request]:
        """The same requests; while they run, files are read that the prompts of the next ones go on
        in."""
        tiers = self.factory.tiers
        if tiers is None:
            return requests

        def read(request: Request) -> list[Future[Tensor | None]]:
            try:
                self._check_length(request)
            except RequestError:  # which is raised in its turn
                return []
            return tiers.prefixes.read(request)

        return tiers.prefixes.read_ahead(requests, read)

    def prefetch_modules(self, segments: Iterable[Segment], cache_salt: str = "") -> None:
        """Read modules that may soon be wanted from the disk, if they are only there."""
        if self.factory.tiers is not None:
            store, moves = self._cache.modules, self.factory.config.sees_distances
            named = ((run_name(cache_salt, one, moves=moves), one) for one in segments)
            self.factory.tiers.modules.prefetch(
                (name, place_of(one, moves=moves), len(one.token_ids))
                for name, one in named
                if store.get(name) is None
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
        if job_id in self.job_ids:
            raise RequestError(f"job id {job_id!r} is in use: give each job its own")
        # Not a generator, which would end with the first error that it passes on.
        checked = filter(None, map(partial(self._of_job, job_id), requests))
        self.queue.add_job(job_id, checked, first=first, groups=groups)

    def _of_job(self, job_id: str, request: Request) -> Request | None:
        try:
            self.admissible(request)
        except RequestError as error:
            self.factory.refused.append(refused_output(request, str(error)))
            return None
        self._job_of[request.request_id] = job_id
        return request

    def remove_job(self, job_id: str) -> list[RequestOutput]:
        """Forget a job's requests that have not begun, and abort the others. Returns
        their outputs."""
        self.queue.remove_job(job_id)
        read = [request_id for request_id, job in self._job_of.items() if job == job_id]
        outputs = []
        for request_id in read:
            self.factory.forget(request_id)
            outputs.append(self.abort(request_id))
        if not self.job_ids:
            self._scheduler().end_plans()
        return [output for output in outputs if output is not None]

    @property
    def job_ids(self) -> list[str]:
        """Jobs that have requests here."""
        return list(dict.fromkeys((*self._job_of.values(), *self.queue.job_ids)))

    def pin_prefix(self, name: str, token_ids: SequenceABC[int], cache_salt: str = "") -> None:
        """Compute a prefix (through `step`) and keep it until `unpin_prefix`.

        Raises:
            RequestError: the name is taken, or too little memory would be left.
        """
        request = self.pins.add(name, token_ids, cache_salt)
        try:
            self.add(request, PREFIXES)
        except RequestError:
            self.pins.remove(name)
            raise

    def unpin_prefix(self, name: str) -> None:
        """Unpin a prefix: it stays cached until its memory is wanted."""
        if not self.pins.remove(name):
            self.abort(prefix_id(name))
        self._scheduler().waiting.forget_short()

    def prefixes(self) -> list[PrefixInfo]:
        """The pinned prefixes."""
        return self.pins.infos(self._scheduler().running, self._cache.tree.num_splits)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its pages are free at once. None if it is not here."""
        waiting = self.queue.interactive.remove(request_id)
        if waiting is not None:
            self.factory.forget(request_id)
            return unbegun_output(waiting, "abort")
        state = self.states.get(request_id)
        return None if state is None else self._end(state)

    def forget(self, ended: Iterable[RequestState]) -> None:
        """Forget requests whose last sequence has ended."""
        for state in ended:
            request = state.request
            self.states.pop(request.request_id, None)
            self._job_of.pop(request.request_id, None)
            aborted = any(sequence.finish_reason == "abort" for sequence in state.sequences)
            if isinstance(request, PrefixRequest) and not aborted:
                self.pins.computed(request)

    def note_weights(self, version: int) -> None:
        """Note other weights from here on."""
        self.factory.weights_version = version
        for state in self.states.values():
            for sequence in state.sequences:
                if sequence.finish_reason is None:
                    sequence.note_weights(version)
        if self.factory.tiers is not None:
            self.factory.tiers.forget()

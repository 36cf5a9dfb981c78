"""From a request to its sequences."""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

from onestem.cache import PagePool
from onestem.engine.grammar.compiler import GrammarCompiler, GrammarState
from onestem.engine.modules.prompt import PmlPrompt
from onestem.engine.outputs import BROKEN, refused_output
from onestem.engine.sampling.seeds import derive_seed
from onestem.engine.schedule.admission import choice_ids
from onestem.engine.schedule.queue import Gate
from onestem.engine.sequence import RequestState, Sequence
from onestem.engine.stats import EngineStats
from onestem.engine.text.detokenize import IncrementalDetokenizer
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import OnestemError
from onestem.models.config import ModelConfig
from onestem.request import Request, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    import xgrammar

__all__ = ["SequenceFactory"]

log = logging.getLogger(__name__)


class SequenceFactory:
    """Makes the sequences of requests that are admitted, and keeps the requests that are open.

    Args:
        config: the model's.
        pool: the KV pages.
        kept_pages: how many of them pinned prefixes keep for good.
        tokenizer, grammars: None for a model without tokenizer.
        max_model_len: most tokens of prompt and answer.
        together: a prompt's n sequences are one until the prompt is computed (prefixes are shared).
        seed: source of seeds for requests that have none; None draws from the system.
        stats: requests are counted there.

    Attributes:
        arrivals: when requests came that are not open yet, by id.
        states: of requests that are open, by id.
        refused: outputs of requests that cannot be opened; whoever hands them on empties it.
    """

    def __init__(
        self,
        config: ModelConfig,
        pool: PagePool,
        *,
        kept_pages: Callable[[], int],
        tokenizer: Tokenizer | None,
        grammars: GrammarCompiler | None,
        max_model_len: int,
        together: bool,
        seed: int | None,
        stats: EngineStats,
    ) -> None:
        self.arrivals: dict[str, float] = {}
        self.states: dict[str, RequestState] = {}
        self.refused: list[RequestOutput] = []
        self._stats = stats
        self._prepared: dict[str, Future[xgrammar.CompiledGrammar]] = {}
        self._config = config
        self._pool = pool
        self._kept_pages = kept_pages
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._together = together
        self._seed = seed

    def gate(self, request: Request) -> tuple[Gate, str]:
        """Whether a request can be opened now, or has to wait for its grammar, which another thread
        compiles; or its grammar is none, and why."""
        response_format = request.params.response_format
        if response_format is None or self._grammars is None:
            return Gate.OPEN, ""
        grammar = self._prepared.get(request.request_id)
        if grammar is None:
            grammar = self._grammars.prepare(response_format)
            if grammar is None:
                return Gate.OPEN, ""
            # Held until it is opened, whatever the compiler forgets.
            self._prepared[request.request_id] = grammar
        if not grammar.done():
            return Gate.WAIT, ""
        error = grammar.exception()
        if error is None:
            return Gate.OPEN, ""
        if not isinstance(error, OnestemError):
            raise error
        return Gate.REFUSE, str(error)

    def wait(self, seconds: float) -> None:
        """Until a grammar that is being compiled is there, or a time has passed."""
        unfinished = [grammar for grammar in self._prepared.values() if not grammar.done()]
        wait(unfinished, seconds, FIRST_COMPLETED)

    def forget(self, request_id: str) -> None:
        """Of a request that is not opened any more."""
        self.arrivals.pop(request_id, None)
        self._prepared.pop(request_id, None)

    def open(self, request: Request) -> RequestState:
        """A request's sequences: one that computes the prompt for all n, unless nothing is shared;
        one for each choice."""
        state = RequestState(
            request,
            self._seed_of(request),
            RequestMetrics(
                num_prompt_tokens=len(request.prompt_token_ids),
                arrival_time=self.arrivals.pop(request.request_id, time.monotonic()),
            ),
            pml=_pml_prompt(request),
        )
        if request.params.choices:
            assert self._tokenizer is not None  # `Engine.validate` saw to it
            state.sequences = [
                self._scoring(state, i, ids)
                for i, ids in enumerate(choice_ids(request, self._tokenizer))
            ]
        else:
            count = 1 if self._together else request.params.n
            state.sequences = [self.sequence(state, i) for i in range(count)]
            state.forked = count == request.params.n
        self._prepared.pop(request.request_id, None)
        self.states[request.request_id] = state
        self._stats.requests += 1
        self._stats.logical_prompt_tokens += len(request.prompt_token_ids) * max(
            len(state.sequences), request.params.n
        )
        return state

    def refuse(self, request: Request, error: Exception) -> None:
        """A request cannot be opened."""
        name = request.request_id
        log.error("request %s cannot be opened", name, exc_info=error)
        self.forget(name)
        reason = f"{BROKEN}{type(error).__name__}: {error}"
        self.refused.append(refused_output(request, reason))

    def _seed_of(self, request: Request) -> int:
        if request.params.seed is not None:
            return request.params.seed
        if self._seed is None:
            return secrets.randbits(63)
        return derive_seed(self._seed, request.request_id)

    def sequence(self, state: RequestState, index: int) -> Sequence:
        """One continuation of a request."""
        request, params = state.request, state.request.params
        sequence = Sequence(state, index, array("i", state.own_prompt))
        sequence.most_tokens = self._most_tokens(state)
        if index == 0:
            sequence.score_from = _first_scored(request)
        if self._tokenizer is not None and (params.stop or request.stream):
            sequence.detokenizer = IncrementalDetokenizer(
                self._tokenizer, params, request.prompt_token_ids
            )
        if params.response_format is not None and self._grammars is not None:
            sequence.grammar = self._grammar_of(state, self._grammars)
        return sequence

    def _grammar_of(self, state: RequestState, grammars: GrammarCompiler) -> GrammarState | None:
        """Compiled here only where no gate was passed: all requests are one caller's then."""
        other = next((s.grammar for s in state.sequences if s.grammar is not None), None)
        if other is not None:
            return other.at_start()
        prepared = self._prepared.get(state.request.request_id)
        if prepared is not None:
            return grammars.state(prepared)
        return grammars.compile(state.request.params.response_format)

    def _most_tokens(self, state: RequestState) -> int:
        """Of a sequence: what it imports takes its part of the model's length and of memory."""
        if state.pml is None:
            return self._max_model_len
        config, pool = self._config, self._pool
        return min(
            self._max_model_len - state.metrics.num_prompt_tokens + len(state.pml.tokens),
            state.pml.most_tokens(
                max_positions=config.max_position_embeddings,
                num_pages=pool.num_pages - self._kept_pages(),
                page_size=pool.page_size,
            ),
        )

    def _scoring(self, state: RequestState, index: int, ids: list[int]) -> Sequence:
        sequence = Sequence(state, index, array("i", [*state.own_prompt, *ids]))
        sequence.num_prompt = len(state.own_prompt)
        sequence.score_from = sequence.num_prompt
        sequence.score_only = True
        return sequence


def _first_scored(request: Request) -> int | None:
    """The first prompt token whose log-probability is wanted; the very first has none."""
    wanted = [] if request.score_from is None else [max(1, request.score_from)]
    if request.params.prompt_logprobs is not None:
        wanted.append(1)
    return min(wanted, default=None)


def _pml_prompt(request: Request) -> PmlPrompt | None:
    if request.pml is None:
        return None
    return PmlPrompt(request.pml, request.cache_salt, request.module_salt)

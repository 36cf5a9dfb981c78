"""From a request to its sequences: whether it can be answered at all, and what computes it."""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from onestem.cache import PagePool
from onestem.checked import show
from onestem.engine.grammar.compiler import GrammarCompiler
from onestem.engine.grammar.rules import TokenRules, spelled
from onestem.engine.grammar.state import Grammar, GrammarState
from onestem.engine.modules.prompt import PmlPrompt
from onestem.engine.outputs import EngineStats, broken, refused_output
from onestem.engine.schedule.answers import AnswerLimit
from onestem.engine.schedule.queue import Gate
from onestem.engine.sequence import Choosing, RequestState, Scoring, Sequence
from onestem.engine.text.detokenize import IncrementalDetokenizer
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import ConfigError, OnestemError, RequestError, UnsupportedError
from onestem.models.config import ModelConfig
from onestem.options import EngineOptions
from onestem.pml import CompiledPrompt, DocumentsPrompt
from onestem.pml.documents import BLOCK
from onestem.request import Request, RequestMetrics, RequestOutput
from onestem.scores import ScorePath, completion_tree
from onestem.seeds import derive_seed

if TYPE_CHECKING:
    from onestem.engine.tiers.tiers import KvTiers


# Of all of a request's choices together: as much work as a long prompt, while others wait.
MAX_CHOICE_TOKENS = 8192


def model_len(limit: int, capacity: int, asked: int | None) -> int:
    """Maximum tokens of prompt and answer, of a model with `limit` positions and KV memory for
    `capacity` tokens.

    Raises:
        ConfigError: `asked` is more than either.
    """
    if asked is None:
        # Where memory is the limit, round it: the next start finds a little more or less free, and
        # a job that goes on must find the same limit.
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


def check_request(
    request: Request,
    *,
    max_model_len: int,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    max_num_seqs: int | None = None,
    answers: AnswerLimit | None = None,
) -> None:
    """Raise `RequestError` for a request that can never be answered; `response_format` is left to
    the grammar compiler."""
    _check_prompt(request, max_model_len, vocab_size)
    if max_num_seqs is not None and request.params.n > max_num_seqs:
        raise RequestError(
            f"n is {request.params.n}, and at most {max_num_seqs} sequences run at once: "
            "lower n or raise max_num_seqs"
        )
    if answers is not None:
        answers.check(request)
    if request.pml is not None and (
        request.score_from is not None or request.params.prompt_logprobs is not None
    ):
        raise RequestError(
            "prompt_logprobs and score_from are not available for prompts in PML or with repair, "
            "whose modules are computed apart: leave them, or repair, out"
        )
    if request.score_from is not None and not isinstance(request.score_from, int):
        raise RequestError(f"score_from is {request.score_from!r}, expected a token's index")
    if not 0 <= request.common_prefix_tokens <= len(request.prompt_token_ids):
        raise RequestError(
            f"common_prefix_tokens is {request.common_prefix_tokens}, expected 0 to "
            f"{len(request.prompt_token_ids)} (the prompt's tokens)"
        )
    _check_ids(request, vocab_size)
    _check_paths(request, max_model_len, vocab_size)
    _check_text(request, tokenizer)
    if request.params.choices and tokenizer is not None:
        _check_choices(request, max_model_len, tokenizer)


def check_for(
    options: EngineOptions,
    request: Request,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    max_model_len: int,
    kv_tokens: int,
) -> None:
    """Raise `RequestError` for a request that an engine with these options, which is elsewhere, can
    never answer."""
    check_request(
        request,
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        tokenizer=tokenizer,
        max_num_seqs=options.max_num_seqs,
    )
    check_pml(
        request,
        config,
        tokenizer,
        num_pages=kv_tokens // options.page_size,
        page_size=options.page_size,
        deterministic=options.deterministic,
        ranks=options.tensor_parallel_size,
        private=options.share == "off",
    )


def check_format(check: Callable[..., object], request: Request) -> None:
    """Check a request's `response_format`; raise `RequestError` for what is not supported."""
    try:
        check(request.params.response_format)
    except UnsupportedError as error:
        raise RequestError(str(error)) from error


def check_modules(config: ModelConfig) -> None:
    """Raise `RequestError` for a model that no prompt can be put together of modules for."""
    if config.delta is not None:
        raise RequestError(
            f"{config.architecture} keeps recurrent states, which cannot be put together of "
            "modules: give text and no repair, or take a model with attention in all layers"
        )


def check_pml(
    request: Request,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    num_pages: int,
    page_size: int,
    deterministic: bool,
    ranks: int,
    private: bool,
) -> None:
    """Raise `RequestError` for a prompt in PML that, with the shortest answer, does not fit in the
    model's positions or in KV memory; and for modules or documents to repair where the engine
    cannot have them.

    Args:
        num_pages: pages that it could have; private: see `PmlPrompt`.
    """
    compiled = request.pml
    if compiled is None:
        return
    check_modules(config)
    if deterministic:
        raise RequestError(
            "a prompt in PML or with repair cannot be deterministic yet: give its text, or leave "
            "repair, or the engine's option deterministic, out"
        )
    if ranks > 1 and isinstance(compiled, DocumentsPrompt) and compiled.documents.repair:
        raise RequestError(
            f"repair is {compiled.documents.repair:g}, and of {ranks} ranks none knows what all of "
            "the model attends to: give 0 or 1"
        )
    answer_tokens = longest_choice(request, tokenizer) or 1
    prompt = PmlPrompt(compiled, "", "", config, private=private)
    positions = config.max_position_embeddings
    if compiled.next_position + answer_tokens > positions:
        raise RequestError(
            f"the answer would begin at position {compiled.next_position}, and the model has "
            f"{positions}: shorten the prompt, or import less"
        )
    if isinstance(compiled, DocumentsPrompt):
        size = BLOCK if config.asks_for_places else max(1, compiled.num_repaired)  # of a run
        num_pages -= compiled.num_repaired // size * -(-size // page_size)
    room = prompt.most_tokens(max_positions=positions, num_pages=num_pages, page_size=page_size)
    if room < len(prompt.tokens) + answer_tokens:
        raise RequestError(
            f"the prompt and what it imports take {prompt.num_pages(page_size)} pages of "
            f"{page_size} tokens, and its answer at least one token; KV memory has {num_pages} "
            "pages for them: raise kv_memory, or import less"
        )


def choice_ids(request: Request, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of a request's choices, as they follow its prompt."""
    return [
        tokenizer.encode(text, add_special_tokens=False) for text in request.params.choices or ()
    ]


def longest_choice(request: Request, tokenizer: Tokenizer | None) -> int:
    """Tokens of the longest of a request's choices; 0: it has none."""
    if not request.params.choices or tokenizer is None:
        return 0
    return max(map(len, choice_ids(request, tokenizer)))


def _check_prompt(request: Request, max_model_len: int, vocab_size: int) -> None:
    known = request.prompt_array
    try:
        ids = known if known is not None else np.asarray(request.prompt_token_ids)
    except ValueError:  # nested, of uneven lengths
        ids = np.zeros((0, 0))
    if ids.ndim == 1 and len(ids) == 0:
        raise RequestError("prompt is empty: expected at least one token")
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and not _are_ints(ids)):
        raise RequestError("prompt is neither text nor a list of token ids (integers)")
    to_answer = 0 if request.paths else 1
    if len(ids) + to_answer > max_model_len:
        raise RequestError(
            f"prompt has {len(ids)} tokens, limit is {max_model_len - to_answer}"
            f"{' (and one to answer)' * to_answer}: "
            "shorten the prompt or raise max_model_len or kv_memory"
        )
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if len(bad):
        raise RequestError(
            f"prompt has token id {int(bad[0])}, expected ids from 0 to {vocab_size - 1}"
        )


def _are_ints(ids: np.ndarray) -> bool:
    """Integers too large for an array's own type come as objects."""
    return ids.dtype == object and all(isinstance(i, int) for i in ids)


def _check_ids(request: Request, vocab_size: int) -> None:
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        highest = max(getattr(request.params, name) or (0,))
        if highest >= vocab_size:
            raise RequestError(f"{name} has token id {highest}, expected ids below {vocab_size}")


def _check_paths(request: Request, max_model_len: int, vocab_size: int) -> None:
    for path in request.paths:
        total = len(request.prompt_token_ids) + len(path.tokens)
        if total > max_model_len:
            raise RequestError(
                f"prompt and completion have {total} tokens before the last, limit is "
                f"{max_model_len}: shorten them or raise max_model_len or kv_memory"
            )
        ids = np.concatenate((path.tokens, path.targets))
        bad = ids[(ids < 0) | (ids >= vocab_size)]
        if len(bad):
            raise RequestError(
                f"completion has token id {int(bad[0])}, expected ids from 0 to {vocab_size - 1}"
            )


def _check_text(request: Request, tokenizer: Tokenizer | None) -> None:
    for name in ("stop", "choices", "response_format", "bad_words"):
        if tokenizer is None and getattr(request.params, name):
            raise RequestError(f"{name} needs a tokenizer, and this model directory has none")


def _check_choices(request: Request, max_model_len: int, tokenizer: Tokenizer) -> None:
    characters = sum(map(len, request.params.choices or ()))
    tokenizer.check_length("choices", characters, MAX_CHOICE_TOKENS)
    encoded = choice_ids(request, tokenizer)
    for text, ids in zip(request.params.choices or (), encoded, strict=True):
        if not ids:
            raise RequestError(f"choices has {show(text)}, which has no tokens in this model")
    together = sum(map(len, encoded))
    if together > MAX_CHOICE_TOKENS:
        raise RequestError(
            f"choices have {together} tokens together, limit is {MAX_CHOICE_TOKENS}: "
            "pick among fewer, then among the winners"
        )
    total = len(request.prompt_token_ids) + max(map(len, encoded)) - 1
    if total > max_model_len:
        raise RequestError(
            f"prompt and choice have {total} tokens before the last, limit is {max_model_len}: "
            "shorten them or raise max_model_len"
        )


log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False, repr=False)
class SequenceFactory:
    """Makes the sequences of requests that are admitted, and keeps the requests that are open.

    Attributes:
        kept_pages: how many of the pool's pages pinned prefixes keep for good.
        tokenizer, grammars: None for a model without tokenizer.
        together: a prompt's n sequences are one until the prompt is computed (prefixes are shared).
        seed: source of seeds for requests that have none; None draws from the system.
        arrivals: arrival times of requests that are not open yet, by id.
        states: of requests that are open, by id.
        refused: outputs of requests that cannot be opened; the reader empties it.
        on_forgotten: called with the id of a request that will not be opened.
        weights_version: of the weights that sequences are made for.
        tiers: where keys and values are kept, beside KV memory.
    """

    config: ModelConfig
    pool: PagePool
    kept_pages: Callable[[], int]
    tokenizer: Tokenizer | None
    grammars: GrammarCompiler | None
    max_model_len: int
    together: bool
    seed: int | None
    stats: EngineStats
    arrivals: dict[str, float] = field(default_factory=dict)
    states: dict[str, RequestState] = field(default_factory=dict)
    refused: list[RequestOutput] = field(default_factory=list)
    on_forgotten: Callable[[str], object] = lambda request_id: None
    weights_version: int = 0
    tiers: KvTiers | None = None
    _prepared: dict[str, Future[Grammar]] = field(default_factory=dict)
    _reading: dict[str, list[Future[Any]]] = field(default_factory=dict)

    def gate(self, request: Request, key: str, weight: float) -> Gate:
        """Whether a request can be opened now, has to wait for its grammar, which is compiled
        elsewhere (and delays no other), or for keys and values that are read, or is refused;
        `key`, `weight`: whose turn that takes."""
        answer = self._grammar_gate(request, key, weight)
        if answer is not Gate.OPEN or self.tiers is None:
            return answer
        reading = self._reading.get(request.request_id)
        if reading is None:
            reading = self._reading[request.request_id] = self.tiers.prefixes.read(request)
        return Gate.OPEN if all(one.done() for one in reading) else Gate.WAIT

    def _grammar_gate(self, request: Request, key: str, weight: float) -> Gate:
        response_format = request.params.response_format
        if response_format is None or self.grammars is None:
            return Gate.OPEN
        grammar = self._prepared.get(request.request_id)
        if grammar is None:
            grammar = self.grammars.prepare(response_format, key, weight)
            if grammar is None:
                return Gate.OPEN
            # Held until the request is opened, whatever the compiler evicts.
            self._prepared[request.request_id] = grammar
        if not grammar.done():
            return Gate.WAIT
        error = grammar.exception()
        if error is None:
            return Gate.OPEN
        self.refuse(request, error)
        return Gate.REFUSE

    def wait(self, seconds: float) -> None:
        """Wait until a grammar is compiled, or something is read, for at most `seconds`."""
        every = chain(self._prepared.values(), *self._reading.values())
        wait([one for one in every if not one.done()], seconds, FIRST_COMPLETED)

    def forget(self, request_id: str) -> None:
        """Forget a request that will not be opened; nobody waits for its grammar then."""
        self.arrivals.pop(request_id, None)
        self._reading.pop(request_id, None)
        grammar = self._prepared.pop(request_id, None)
        if grammar is not None:
            grammar.cancel()
        self.on_forgotten(request_id)

    def open(self, request: Request) -> RequestState:
        """Make a request's sequences: one that computes the prompt for all n, or n if nothing is
        shared; or one for each of its paths, or of its choices' paths."""
        state = RequestState(
            request,
            self._seed_of(request),
            RequestMetrics(
                num_prompt_tokens=len(request.prompt_token_ids),
                arrival_time=self.arrivals.pop(request.request_id, time.monotonic()),
            ),
        )
        self.set_pml(state, request.pml)
        if not _chooses(request.pml):
            state.sequences = self.scoring_given(state)
        if not state.sequences:
            count = 1 if self.together else request.params.n
            state.sequences = [self.sequence(state, i) for i in range(count)]
            state.forked = count == request.params.n
        self._prepared.pop(request.request_id, None)
        self._reading.pop(request.request_id, None)
        self.states[request.request_id] = state
        self.stats.requests += 1
        self.stats.logical_prompt_tokens += len(request.prompt_token_ids) * max(
            len(state.sequences), request.params.n
        ) + sum(len(path.tokens) for path in request.paths)
        return state

    def scoring_given(self, state: RequestState) -> list[Sequence]:
        """Sequences that score a request's paths, or those of its choices; there may be none."""
        request = state.request
        if request.params.choices:
            assert self.tokenizer is not None  # `Requests.validate` saw to it
            state.choices, paths = completion_tree(choice_ids(request, self.tokenizer))
            alternatives = request.params.logprobs
            return [self._scoring(state, i, path, alternatives) for i, path in enumerate(paths)]
        sequences = [self._scoring(state, i, path) for i, path in enumerate(request.paths)]
        for sequence in sequences:
            sequence.num_prompt = len(sequence.tokens)
        return sequences

    def set_pml(self, state: RequestState, compiled: CompiledPrompt | None) -> None:
        """Set what a request's sequences compute and import; None: the prompt as it is."""
        request = state.request
        if compiled is not None:
            salts = request.cache_salt, request.module_salt
            chooses = compiled is request.pml and _chooses(compiled)
            state.pml = PmlPrompt(
                compiled, *salts, self.config, chooses=chooses, private=not self.together
            )
        state.most_tokens = self._most_tokens(state)

    def refuse(self, request: Request, error: BaseException) -> None:
        """Note the output of a request that cannot be opened."""
        if not isinstance(error, OnestemError):
            log.error("request %s cannot be opened", request.request_id, exc_info=error)
        self.forget(request.request_id)
        reason = str(error) if isinstance(error, OnestemError) else broken(error)
        self.refused.append(refused_output(request, reason))

    def _seed_of(self, request: Request) -> int:
        if request.params.seed is not None:
            return request.params.seed
        if self.seed is None:
            return secrets.randbits(63)
        return derive_seed(self.seed, request.request_id)

    def sequence(self, state: RequestState, index: int) -> Sequence:
        """One continuation of a request."""
        request, params = state.request, state.request.params
        known = request.prompt_array if state.pml is None else None
        ids = state.own_prompt if known is None else known.astype(np.intc).tobytes()
        sequence = Sequence(state, index, array("i", ids), self.weights_version)
        if index == 0:
            sequence.scoring = _prompt_scoring(request)
        if _chooses(request.pml) and not state.forked:
            first = len(sequence.tokens) - (len(request.pml.ids) - request.pml.question)
            assert state.pml is not None
            sees = min(one.first for one in state.pml.imports)
            sequence.choosing = Choosing(request.pml, first, sees)
        if params.stop or request.stream:
            sequence.answer.detokenizer = self.detokenizer(request)
        sequence.answer.grammar = self._grammar_of(state)
        return sequence

    def detokenizer(self, request: Request) -> IncrementalDetokenizer | None:
        """A detokenizer for a sequence of a request; None: there is no text."""
        if self.tokenizer is None:
            return None
        return IncrementalDetokenizer(self.tokenizer, request.params, request.prompt_token_ids)

    def _grammar_of(self, state: RequestState) -> GrammarState | TokenRules | None:
        """The constraint on its sequences' tokens; None: there is none."""
        params, grammar = state.request.params, None
        if not (params.response_format or params.allowed_token_ids or params.bad_words):
            return None
        grammars = (sequence.answer.grammar for sequence in state.sequences)
        other = next((one for one in grammars if one is not None), None)
        if other is not None:
            return other.at_start()
        if params.response_format is not None and self.grammars is not None:
            prepared = self._prepared.get(state.request.request_id)
            if prepared is not None:
                grammar = self.grammars.state(prepared)
            else:  # no gate was passed: all requests are one caller's, who waits
                grammar = self.grammars.compile(params.response_format)
        if params.allowed_token_ids is None and not params.bad_words:
            return grammar
        bad: list[list[int]] = []
        if self.tokenizer is not None:
            encode = partial(self.tokenizer.encode_batch, add_special_tokens=False)
            bad = [form for word in params.bad_words for form in spelled(word, encode)]
        return TokenRules(
            self.config.vocab_size,
            allowed=params.allowed_token_ids,
            bad=bad,
            grammar=grammar,
        )

    def _most_tokens(self, state: RequestState) -> int:
        """Maximum tokens of a sequence; imports take their part of length and memory."""
        if state.pml is None:
            return self.max_model_len
        config, pool = self.config, self.pool
        return min(
            self.max_model_len - state.metrics.num_prompt_tokens + len(state.pml.tokens),
            state.pml.most_tokens(
                max_positions=config.max_position_embeddings,
                num_pages=pool.num_pages - self.kept_pages(),
                page_size=pool.page_size,
            ),
        )

    def _scoring(
        self, state: RequestState, index: int, path: ScorePath, alternatives: int | None = None
    ) -> Sequence:
        prompt = state.own_prompt
        tokens = np.concatenate((prompt, path.tokens)).astype(np.intc)
        sequence = Sequence(state, index, array("i", tokens.tobytes()), self.weights_version)
        sequence.num_prompt = len(prompt)
        rows = path.rows + (len(prompt) - 1)
        sequence.scoring = Scoring(rows, path.targets, alternatives, is_all=True)
        return sequence


def _chooses(pml: CompiledPrompt | None) -> TypeGuard[DocumentsPrompt]:
    """Whether a prompt is computed first to see what is to be repaired."""
    return isinstance(pml, DocumentsPrompt) and pml.num_repaired > 0


def _prompt_scoring(request: Request) -> Scoring | None:
    """Scoring of the prompt's own tokens; the very first has no log-probability."""
    wanted = [] if request.score_from is None else [max(1, request.score_from)]
    alternatives = request.params.prompt_logprobs
    if alternatives is not None:
        wanted.append(1)
    if not wanted:
        return None
    targets = np.asarray(request.prompt_token_ids[min(wanted) :], np.int64)
    rows = np.arange(len(targets)) + (min(wanted) - 1)
    return Scoring(rows, targets, alternatives or 0)

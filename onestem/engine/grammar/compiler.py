"""Structured output: `response_format` as a mask over the next token, by xgrammar.

A grammar is compiled once per format (milliseconds, or seconds for large schemas) and kept; each
sequence then has a matcher that walks along its tokens. The matcher is a function of the sampled
ids, so a sequence that was preempted or resumed rebuilds it from them.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onestem.engine.grammar.schema import SCHEMA, check_schema, ebnf_of
from onestem.engine.grammar.tags import check_tags, tags_of, with_grammars
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    import xgrammar

__all__ = ["GrammarCompiler", "GrammarState", "packed"]

_CACHE_ENTRIES = 256
# Of `prepare`: a slow schema does not hold up the next, and each has threads of its own besides.
_THREADS = 2


class _Wanted(NamedTuple):
    """What a format asks: a JSON schema, or a structural tag's format."""

    schema: dict[str, Any] | None
    tags: dict[str, Any] | None
    strict: bool = True
    any_whitespace: bool = False

    @property
    def key(self) -> str:
        # Properties are written in the schema's order, so keys must not be sorted.
        try:
            return json.dumps(self)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"response_format is not JSON: {error}") from error

    def check(self) -> None:
        if self.schema is not None:
            check_schema(self.schema, self.strict)
        if self.tags is not None:
            check_tags(self.tags)


def _wanted(response_format: Mapping[str, Any] | None) -> _Wanted | None:
    """Of a format (`request.ResponseFormat`); None where any text will do."""
    if response_format is None or response_format["type"] == "text":
        return None
    tags = tags_of(response_format)
    if tags is not None:
        return _Wanted(None, tags)
    any_whitespace = bool(response_format.get("any_whitespace"))
    if response_format["type"] == "json_object":
        return _Wanted({"type": "object"}, None, False, any_whitespace)
    given = response_format["json_schema"]
    strict = given.get("strict") is not False
    return _Wanted(dict(given["schema"]), None, strict, any_whitespace)


class GrammarCompiler:
    """Compiles response formats for one tokenizer. Safe to use from several threads: a format is
    compiled once, and who wants another does not wait for it.

    Args:
        tokenizer: the model's.
        vocab_size: columns of the logits, if there are more than tokens; those are never allowed.
        stop_token_ids: ids that may end an answer once it is complete: all end-of-sequence ids of
            the model. None: the tokenizer's one.

    xgrammar is imported with the first format that needs it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int | None = None,
        stop_token_ids: Iterable[int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size or tokenizer.vocab_size
        eos = tokenizer.eos_token_id
        named = (() if eos is None else (eos,)) if stop_token_ids is None else stop_token_ids
        self.stop_token_ids = sorted(set(named))
        self._lock = threading.Lock()  # held for moments, never while compiling
        self._loading = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._compiled: OrderedDict[str, Future[xgrammar.CompiledGrammar]] = OrderedDict()
        self._checked: OrderedDict[str, None] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None

    def compile(
        self, response_format: Mapping[str, Any] | None, output_token_ids: Iterable[int] = ()
    ) -> GrammarState | None:
        """A new sequence's state; None where the format is text. Compiles in this thread, or waits
        for the one that does.

        Args:
            response_format: OpenAI's object.
            output_token_ids: tokens that the sequence sampled already.

        Raises:
            RequestError: the format or its schema is not one, or the tokens do not follow it.
            UnsupportedError: the schema uses what cannot be enforced or is too large, or xgrammar
                is not installed.
        """
        wanted = self.check(response_format)
        if wanted is None:
            return None
        key, grammar, is_new = self._entry(wanted)
        if is_new:
            self._compile_into(grammar, key, wanted)
        state = self.state(grammar)
        for token in output_token_ids:
            state.accept(token)
        return state

    def check(self, response_format: Mapping[str, Any] | None) -> _Wanted | None:
        """What a format asks, found good once for each: the only entrance of schemas. None where
        any text will do.

        Raises:
            RequestError: the schema is none.
            UnsupportedError: it uses what cannot be enforced, or is too large.
        """
        wanted = _wanted(response_format)
        if wanted is None:
            return None
        key = wanted.key
        with self._lock:
            known = key in self._checked
        if not known:
            wanted.check()
            with self._lock:
                self._checked[key] = None
                while len(self._checked) > _CACHE_ENTRIES:
                    self._checked.popitem(last=False)
        return wanted

    def prepare(
        self, response_format: Mapping[str, Any] | None
    ) -> Future[xgrammar.CompiledGrammar] | None:
        """What will be the grammar, or the error that `compile` raises: compiled by another thread
        if it is not there. None where the format is text."""
        wanted = self.check(response_format)
        if wanted is None:
            return None
        key, grammar, is_new = self._entry(wanted)
        if is_new:
            self._executor().submit(self._compile_into, grammar, key, wanted)
        return grammar

    def state(self, grammar: Future[xgrammar.CompiledGrammar]) -> GrammarState:
        """A new sequence's state in a grammar of `prepare`; waits until it is compiled."""
        return GrammarState(grammar.result(), self.vocab_size, self.stop_token_ids)

    def close(self) -> None:
        """End the threads; what is being compiled is not waited for."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _entry(self, wanted: _Wanted) -> tuple[str, Future[xgrammar.CompiledGrammar], bool]:
        """A format's key, its grammar and whether the caller is to compile it."""
        key = wanted.key
        with self._lock:
            known = self._compiled.get(key)
            if known is not None:
                self._compiled.move_to_end(key)
                return key, known, False
            new = self._compiled[key] = Future()
            self._forget_oldest()
            return key, new, True

    def _forget_oldest(self) -> None:
        """Those that are being compiled stay: nobody is to begin them again."""
        left = len(self._compiled) - _CACHE_ENTRIES
        if left > 0:
            done = (key for key, grammar in self._compiled.items() if grammar.done())
            for key in list(itertools.islice(done, left)):
                del self._compiled[key]

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "grammars")
            return self._threads

    def _compile_into(
        self, grammar: Future[xgrammar.CompiledGrammar], key: str, wanted: _Wanted
    ) -> None:
        try:
            compiled = self._compile(wanted)
        except BaseException as error:
            with self._lock:
                self._compiled.pop(key, None)
            grammar.set_exception(error)
            return
        grammar.set_result(compiled)

    def _compile(self, wanted: _Wanted) -> xgrammar.CompiledGrammar:
        compiler = self._loaded()
        try:
            if wanted.schema is None:
                tags = {"type": "structural_tag", "format": with_grammars(wanted.tags)}
                return compiler.compile_structural_tag(tags)
            return compiler.compile_grammar(
                ebnf_of(wanted.schema, strict=wanted.strict, any_whitespace=wanted.any_whitespace)
            )
        except Exception as error:  # xgrammar raises many kinds for a bad schema
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            reason = re.sub(r"^\[[^]]*\] \S+: ", "", reason)  # time and source line
            name = SCHEMA if wanted.schema is not None else "response_format"
            raise RequestError(f"{name} cannot be used: {reason}") from error

    def _loaded(self) -> xgrammar.GrammarCompiler:
        with self._loading:
            if self._compiler is None:
                self._compiler = self._load()
            return self._compiler

    def _load(self) -> xgrammar.GrammarCompiler:
        try:
            import xgrammar
        except ImportError as error:
            raise UnsupportedError(
                "response_format needs xgrammar, which is not installed: pip install xgrammar"
            ) from error
        special = self._tokenizer.special_ids
        vocabulary = [  # what has no bytes is never allowed
            b"" if token in special else self._tokenizer.token_bytes(token)
            for token in range(min(self._tokenizer.vocab_size, self.vocab_size))
        ]
        info = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=self.stop_token_ids,
        )
        # One cache is enough, and ours is bounded.
        return xgrammar.GrammarCompiler(info, cache_enabled=False)


class GrammarState:
    """Where one sequence stands in its grammar."""

    def __init__(
        self, grammar: xgrammar.CompiledGrammar, vocab_size: int, stop_token_ids: list[int]
    ) -> None:
        import xgrammar

        self._origin = (grammar, vocab_size, stop_token_ids)
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._mask = torch.full(((vocab_size + 31) // 32,), -1, dtype=torch.int32)
        self._stops = packed(stop_token_ids, len(self._mask))
        self._filled = False

    def at_start(self) -> GrammarState:
        """Another sequence's, in the same grammar."""
        return GrammarState(*self._origin)

    def fill_mask(self) -> Tensor:
        """Which tokens may come next: bits packed in int32 `[ceil(vocab / 32)]`, on the CPU.

        The tensor belongs to this state and is written again at the next call after `accept`.
        """
        if not self._filled:
            if self._matcher.is_terminated():
                self._mask.copy_(self._stops)
            else:
                self._matcher.fill_next_token_bitmask(self._mask.unsqueeze(0))
            self._filled = True
        return self._mask

    def accept(self, token_id: int) -> None:
        """Take a sampled token.

        Raises:
            RequestError: the grammar does not allow it.
        """
        if not self._matcher.accept_token(token_id):
            raise RequestError(
                f"token {token_id} does not follow the response_format, expected one that "
                "fill_mask allows"
            )
        self._filled = False

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing but its end may follow, or it has ended.

        So a closed JSON object ends without a step for the end-of-sequence token.
        """
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        return not bool((self.fill_mask() & ~self._stops).any())


def packed(token_ids: Iterable[int], num_words: int) -> Tensor:
    """Token ids as bits of int32 `[num_words]`."""
    words = [0] * num_words
    for token in token_ids:
        if token < 32 * num_words:
            words[token // 32] |= 1 << (token % 32)
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)

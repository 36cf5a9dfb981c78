"""Structured output: `response_format` as a mask over the next token, by xgrammar.

A grammar is compiled once per format (milliseconds, or seconds for large schemas) and kept; each
sequence then has a matcher that walks along its tokens. The matcher is a function of the sampled
ids, so a sequence that was preempted or resumed rebuilds it from them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onestem.engine.grammar.schema import check_schema, ebnf_of, unusable
from onestem.engine.grammar.tags import check_tags, compilable, is_simple, named_tokens, tags_of
from onestem.engine.grammar.trial import Limits, TooCostlyError, TooSlowError, Trial
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    import xgrammar

__all__ = ["Grammar", "GrammarCompiler", "GrammarState", "packed"]

_CACHE_ENTRIES = 256
# Of `prepare`: a slow schema does not delay the next; each compilation has more threads of its own.
_THREADS = 4
# Stands before a control token's name in its bytes. No UTF-8 has it, so no text and no character
# class admits the token, only a structural tag that names it.
_CONTROL = b"\xff"


class _Wanted(NamedTuple):
    """What is asked for: a JSON schema, or a structural tag's format and its name in errors."""

    schema: dict[str, Any] | None
    tags: dict[str, Any] | None
    strict: bool = True
    any_whitespace: bool = False
    name: str = ""

    @property
    def key(self) -> str:
        # Properties are written in the schema's order, so keys must not be sorted.
        try:
            return json.dumps(self)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"response_format is not JSON: {error}") from error

    @property
    def is_costly(self) -> bool:
        """Whether compiling may take arbitrarily long."""
        return self.tags is not None and not is_simple(self.tags)

    def check(self) -> None:
        if self.schema is not None:
            check_schema(self.schema, self.strict)
        if self.tags is not None:
            check_tags(self.tags)


def _wanted(response_format: Mapping[str, Any] | None) -> _Wanted | None:
    """What a format (`request.ResponseFormat`) asks for; None where any text will do."""
    if response_format is None or response_format["type"] == "text":
        return None
    tags = tags_of(response_format)
    if tags is not None:
        kind = response_format["type"]
        return _Wanted(
            None, tags, name=kind if kind in response_format else "response_format.format"
        )
    any_whitespace = bool(response_format.get("any_whitespace"))
    if response_format["type"] == "json_object":
        return _Wanted({"type": "object"}, None, False, any_whitespace)
    given = response_format["json_schema"]
    strict = given.get("strict") is not False
    return _Wanted(dict(given["schema"]), None, strict, any_whitespace)


class Grammar(NamedTuple):
    """A format, compiled; `allowed`: the tokens it may ever allow, bits packed as in a mask."""

    compiled: xgrammar.CompiledGrammar
    allowed: Tensor


class GrammarCompiler:
    """Compiles response formats for one tokenizer. Safe to use from several threads: a format is
    compiled once, and requests for another do not wait for it.

    Args:
        tokenizer: the model's.
        vocab_size: columns of the logits, if there are more than tokens; more are never allowed.
        stop_token_ids: ids that may end an answer once it is complete: all end-of-sequence ids of
            the model. None: the tokenizer's one.
        limits: of what a regular expression, a grammar or a structural tag may take.

    xgrammar is imported with the first format that needs it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int | None = None,
        stop_token_ids: Iterable[int] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits or Limits()
        self.vocab_size = vocab_size or tokenizer.vocab_size
        eos = tokenizer.eos_token_id
        named = (() if eos is None else (eos,)) if stop_token_ids is None else stop_token_ids
        self.stop_token_ids = sorted(set(named))
        self._lock = threading.Lock()  # held for moments, never while compiling
        self._loading = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._info: xgrammar.TokenizerInfo | None = None
        self._trials: dict[bool, Trial] = {}  # by whether they are quick
        self._compiled: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self._checked: OrderedDict[str, None] = OrderedDict()
        # Others wait for processes. A thread starts when it first has something to do.
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        self._quick_thread = ThreadPoolExecutor(1, "quick grammars")
        self._slow_thread = ThreadPoolExecutor(1, "slow grammars")

    def compile(
        self, response_format: Mapping[str, Any] | None, output_token_ids: Iterable[int] = ()
    ) -> GrammarState | None:
        """A new sequence's state; None where the format is text. Compiles in this thread, or waits
        for the one that does.

        Args:
            response_format: OpenAI's object.
            output_token_ids: tokens that the sequence has already sampled.

        Raises:
            RequestError: the format or its schema is not valid, or the tokens do not follow it.
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
        """What a format asks for, checked once for each: all schemas come in here. None where any
        text will do.

        Raises:
            RequestError: the schema is not valid.
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

    def prepare(self, response_format: Mapping[str, Any] | None) -> Future[Grammar] | None:
        """A future with the grammar, or the error that `compile` raises; another thread compiles it
        if it is not there. None where the format is text."""
        wanted = self.check(response_format)
        if wanted is None:
            return None
        key, grammar, is_new = self._entry(wanted)
        if is_new:
            if wanted.is_costly:
                self._quick_thread.submit(self._compile_into, grammar, key, wanted, quick=True)
            else:
                self._threads.submit(self._compile_into, grammar, key, wanted)
        return grammar

    def state(self, grammar: Future[Grammar]) -> GrammarState:
        """A new sequence's state in a grammar of `prepare`; waits until it is compiled."""
        return GrammarState(grammar.result(), self.vocab_size, self.stop_token_ids)

    def close(self) -> None:
        """End the threads and the processes; what is being compiled is not waited for."""
        for threads in (self._threads, self._quick_thread, self._slow_thread):
            threads.shutdown(wait=False, cancel_futures=True)
        for trial in list(self._trials.values()):
            trial.close()

    def _entry(self, wanted: _Wanted) -> tuple[str, Future[Grammar], bool]:
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
        """Drop the oldest; those that are being compiled stay, so that none begins again."""
        left = len(self._compiled) - _CACHE_ENTRIES
        if left > 0:
            done = (key for key, grammar in self._compiled.items() if grammar.done())
            for key in list(itertools.islice(done, left)):
                del self._compiled[key]

    def _compile_into(
        self, grammar: Future[Grammar], key: str, wanted: _Wanted, *, quick: bool = False
    ) -> None:
        """Set `grammar`. `quick`: one that takes longer goes to the thread of slow ones."""
        try:
            compiled = self._compile(wanted, quick=quick)
        except BaseException as error:
            if quick and isinstance(error, TooSlowError):
                self._slow_thread.submit(self._compile_into, grammar, key, wanted)
                return
            if not isinstance(error, TooCostlyError):  # which is known then
                with self._lock:
                    self._compiled.pop(key, None)
            grammar.set_exception(error)
            return
        grammar.set_result(compiled)

    def _compile(self, wanted: _Wanted, *, quick: bool) -> Grammar:
        compiler, info = self._loaded()
        if wanted.schema is not None:
            strict, any_whitespace = wanted.strict, wanted.any_whitespace
            ebnf = ebnf_of(wanted.schema, strict=strict, any_whitespace=any_whitespace)
            return Grammar(compiler.compile_grammar(ebnf), self._allowed(()))
        tag = compilable(wanted.tags, self._tokenizer.control_token)
        text = json.dumps({"type": "structural_tag", "format": tag})
        if wanted.is_costly:
            tried = self._tried(info, quick=quick).compile(text, wanted.name)
            compiled = _deserialized(tried, info)
        else:
            try:
                compiled = compiler.compile_structural_tag(text)
            except Exception as error:  # it raises many kinds for a bad tag
                raise unusable(wanted.name, str(error)) from error
        return Grammar(compiled, self._allowed(named_tokens(tag)))

    def _allowed(self, named: Iterable[int]) -> Tensor:
        """All tokens but control tokens, unless they end an answer or are named."""
        never = self._tokenizer.special_ids.difference(self.stop_token_ids, named)
        return ~packed(never, (self.vocab_size + 31) // 32)

    def _loaded(self) -> tuple[xgrammar.GrammarCompiler, xgrammar.TokenizerInfo]:
        with self._loading:
            if self._compiler is None or self._info is None:
                self._compiler, self._info = self._load()
            return self._compiler, self._info

    def _tried(self, info: xgrammar.TokenizerInfo, *, quick: bool) -> Trial:
        with self._loading:
            if quick not in self._trials:
                limits = self._limits
                if quick:
                    limits = dataclasses.replace(limits, cpu_seconds=limits.quick_seconds)
                self._trials[quick] = Trial(info.serialize_json(), self.vocab_size, limits)
            return self._trials[quick]

    def _load(self) -> tuple[xgrammar.GrammarCompiler, xgrammar.TokenizerInfo]:
        try:
            import xgrammar
        except ImportError as error:
            raise UnsupportedError(
                "response_format needs xgrammar, which is not installed: pip install xgrammar"
            ) from error
        special = self._tokenizer.special_ids
        vocabulary = [
            _CONTROL * (token in special) + self._tokenizer.token_bytes(token)
            for token in range(min(self._tokenizer.vocab_size, self.vocab_size))
        ]
        info = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=self.stop_token_ids,
        )
        # One cache is enough, and ours is bounded.
        return xgrammar.GrammarCompiler(info, cache_enabled=False), info


class GrammarState:
    """State of one sequence in its grammar."""

    def __init__(self, grammar: Grammar, vocab_size: int, stop_token_ids: list[int]) -> None:
        import xgrammar

        self._origin = (grammar, vocab_size, stop_token_ids)
        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self._allowed = grammar.allowed
        self._mask = torch.full(((vocab_size + 31) // 32,), -1, dtype=torch.int32)
        self._stops = packed(stop_token_ids, len(self._mask))
        self._filled = False

    def at_start(self) -> GrammarState:
        """The state of another sequence in the same grammar."""
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
                self._mask &= self._allowed
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


def _deserialized(text: str, info: xgrammar.TokenizerInfo) -> xgrammar.CompiledGrammar:
    import xgrammar

    return xgrammar.CompiledGrammar.deserialize_json(text, info)


def packed(token_ids: Iterable[int], num_words: int) -> Tensor:
    """Token ids as bits of int32 `[num_words]`."""
    words = [0] * num_words
    for token in token_ids:
        if token < 32 * num_words:
            words[token // 32] |= 1 << (token % 32)
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)

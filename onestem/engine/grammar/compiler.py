"""Structured output: `response_format` as a mask over the next token, by xgrammar.

A grammar is compiled once per format, in a process that can be ended (milliseconds, or seconds for
large schemas), and kept; each sequence then has a matcher that walks along its tokens. The matcher
is a function of the sampled ids, so a sequence that was preempted or resumed rebuilds it from them.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from onestem.engine.grammar.ebnf import SHORT, longest_entry
from onestem.engine.grammar.kept import Kept
from onestem.engine.grammar.lanes import Lane
from onestem.engine.grammar.schema import SCHEMA, check_schema
from onestem.engine.grammar.state import Grammar, GrammarState, packed
from onestem.engine.grammar.tags import (
    check_depth,
    check_tags,
    is_simple,
    named_tokens,
    tags_of,
    with_token_ids,
)
from onestem.engine.grammar.trial import (
    Compilable,
    CostlyGrammarError,
    GrammarLimits,
    Pace,
    SlowGrammarError,
    Trial,
    Trials,
)
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import OnestemError, RequestError, UnsupportedError
from onestem.request import WHITESPACE, Whitespace, whitespace_of

if TYPE_CHECKING:
    import xgrammar

_MOST_CHECKED = 1_000
# Slow grammars are compiled one at a time, or two where steps have cores enough beside them.
_MANY_CORES = 8
# Of a grammar that the machine has no time or memory for.
MOST_TRIES = 3
# Precedes a control token's name in its bytes. No UTF-8 has it, so no text and no character
# class admits the token, only a structural tag that names it.
_CONTROL = b"\xff"


class _Wanted(NamedTuple):
    """What is asked for: a JSON schema, or a structural tag's format; and its name in errors."""

    schema: dict[str, Any] | None
    tags: dict[str, Any] | None
    strict: bool = True
    whitespace: Whitespace = WHITESPACE
    name: str = SCHEMA

    @property
    def key(self) -> str:
        # Properties are written in the schema's order, so keys must not be sorted.
        try:
            text = json.dumps(self)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"response_format is not JSON: {error}") from error
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

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
    whitespace = whitespace_of(response_format) or WHITESPACE
    if response_format["type"] == "json_object":
        return _Wanted({"type": "object"}, None, False, whitespace)
    given = response_format["json_schema"]
    strict = given.get("strict") is not False
    return _Wanted(dict(given["schema"]), None, strict, whitespace)


class _Task:
    """A format that is being compiled, or waits for its turn.

    Attributes:
        waiting: the callers' futures, each with a key and its weight.
        place: of the try that it waits for.
        begun: whether it is being compiled; trial: the process that does so.
        tries: how often the machine had too little time or memory for it.
    """

    def __init__(self, key: str, wanted: _Wanted) -> None:
        self.key = key
        self.wanted = wanted
        self.place = 0
        self.waiting: dict[Future[Grammar], tuple[str, float]] = {}
        self.begun = False
        self.trial: Trial | None = None
        self.tries = 0


def _weakly(method: weakref.WeakMethod[Callable[..., None]], place: int, task: _Task) -> None:
    """Call a method of a compiler, if it is there: threads that wait keep none."""
    call = method()
    if call is not None:
        call(task, place)


class GrammarCompiler:
    """Compiles response formats for one tokenizer. Safe to use from several threads: a format is
    compiled once. Each gets a short try first; what takes longer waits for its turn among those
    that do. Keys take turns among all. A format that nobody waits for any more is not compiled on.

    Args:
        tokenizer: the model's.
        vocab_size: columns of the logits, if there are more than tokens; more are never allowed.
        stop_token_ids: ids that may end an answer once it is complete: all end-of-sequence ids of
            the model. None: the tokenizer's one.
        limits: of what a format may take.

    xgrammar is imported with the first format that needs it.

    Attributes:
        kept: what was compiled.
        tasks: what is being compiled or waits for it, by the formats' keys.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int | None = None,
        stop_token_ids: Iterable[int] | None = None,
        limits: GrammarLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.limits = limits or GrammarLimits()
        self.vocab_size = vocab_size or tokenizer.vocab_size
        eos = tokenizer.eos_token_id
        named = (() if eos is None else (eos,)) if stop_token_ids is None else stop_token_ids
        self.stop_token_ids = sorted(set(named))
        self._lock = threading.RLock()  # held for moments, never while compiling
        self._loading = threading.Lock()
        self._loaded_once: tuple[Trials, xgrammar.TokenizerInfo] | None = None
        self.kept = Kept(self.limits.all_kept_bytes)
        self.tasks: dict[str, _Task] = {}
        self._checked: OrderedDict[str, None] = OrderedDict()
        num_slow = 1 if (os.cpu_count() or 1) < _MANY_CORES else 2
        short = self.limits.short_tries
        self._lanes: list[Lane[_Task]] = [
            Lane(
                f"grammars {place}",
                1 if place < len(short) else num_slow,
                partial(_weakly, weakref.WeakMethod(self._try), place),
                advance=short[0] if place == 0 else 0.0,
            )
            for place in range(len(short) + 1)
        ]
        for lane in self._lanes:
            weakref.finalize(self, lane.close)

    def compile(self, response_format: Mapping[str, Any] | None) -> GrammarState | None:
        """A new sequence's state; None where the format is text. Waits until it is compiled.

        Args:
            response_format: OpenAI's object.

        Raises:
            RequestError: the format or its schema is not valid.
            UnsupportedError: the schema uses what cannot be enforced or is too large, or xgrammar
                is not installed.
        """
        grammar = self.prepare(response_format)
        if grammar is None:
            return None
        try:
            return self.state(grammar)
        finally:
            grammar.cancel()  # an interrupt: nobody waits for it

    def check(self, response_format: Mapping[str, Any] | None) -> None:
        """Check a format, once for each.

        Raises:
            RequestError: the schema is not valid.
            UnsupportedError: it uses what cannot be enforced, or is too large.
        """
        wanted = _wanted(response_format)
        if wanted is not None and not self._is_checked(key := wanted.key):
            wanted.check()
            self._add_checked(key)

    def _is_checked(self, key: str) -> bool:
        with self._lock:
            return key in self._checked

    def _add_checked(self, key: str) -> None:
        with self._lock:
            self._checked[key] = None
            while len(self._checked) > _MOST_CHECKED:
                self._checked.popitem(last=False)

    def prepare(
        self, response_format: Mapping[str, Any] | None, key: str = "", weight: float = 1.0
    ) -> Future[Grammar] | None:
        """A future with the grammar, or the error that `compile` raises. None where the format is
        text. Cancelling it gives up the grammar; if nobody else waits for it, compiling ends.
        Checking a large schema takes 10 ms, so that is done where it is compiled.

        Args:
            key: of the request; keys take turns.
            weight: the key's share.

        Raises:
            RequestError: the format is not JSON.
        """
        wanted = _wanted(response_format)
        if wanted is None:
            return None
        name = wanted.key
        grammar: Future[Grammar] = Future()
        with self._lock:
            known = self.kept.get(name)
            if known is None:
                self._wait(grammar, name, wanted, key, weight)
        if isinstance(known, Grammar):
            grammar.set_result(known)
        elif known is not None:
            grammar.set_exception(copy(known))  # each raise adds frames to an error
        return grammar

    def state(self, grammar: Future[Grammar]) -> GrammarState:
        """A new sequence's state in a grammar of `prepare`; waits until it is compiled."""
        return GrammarState(grammar.result(), self.vocab_size, self.stop_token_ids)

    def close(self) -> None:
        """End the threads and the processes; what is being compiled is not waited for."""
        for lane in self._lanes:
            lane.close()
        with self._lock:
            waiting = [grammar for task in self.tasks.values() for grammar in task.waiting]
        for grammar in waiting:
            grammar.cancel()
        if self._loaded_once is not None:
            self._loaded_once[0].close()

    def _wait(
        self, grammar: Future[Grammar], name: str, wanted: _Wanted, key: str, weight: float
    ) -> None:
        """Have a format compiled for a caller, which gets it by `grammar`."""
        task = self.tasks.get(name)
        if task is None:
            task = self.tasks[name] = _Task(name, wanted)
        task.waiting[grammar] = key, weight
        if not task.begun:
            self._lanes[task.place].push(task, key, weight)
        grammar.add_done_callback(lambda done: self._leave(task, done))

    def _leave(self, task: _Task, grammar: Future[Grammar]) -> None:
        """Somebody does not wait any more."""
        with self._lock:
            task.waiting.pop(grammar, None)
            if task.waiting or self.tasks.get(task.key) is not task:
                return
            del self.tasks[task.key]
            self._lanes[task.place].discard(task)
            if task.trial is not None:
                task.trial.end()

    def _try(self, task: _Task, place: int) -> None:
        """Compile a task, and answer the callers that wait for it."""
        with self._lock:
            # Somebody may have queued it again just when it was taken.
            if task.begun or task.place != place or self.tasks.get(task.key) is not task:
                return
            task.begun = True
        result: Grammar | BaseException
        try:
            result = self._compiled(task)
        except OnestemError as error:
            result = error.with_traceback(None)  # whose frames have the whole format
        except BaseException as error:
            result = error
        with self._lock:
            task.begun, task.trial = False, None
            if self._is_tried_again(task, result):
                task.place = min(place + 1, len(self._lanes) - 1)
                for key, weight in task.waiting.values():
                    self._lanes[task.place].push(task, key, weight)
                return
            if self.tasks.get(task.key) is not task:
                return
            del self.tasks[task.key]
            if isinstance(result, Grammar):
                self.kept.add(task.key, result)
            elif isinstance(result, CostlyGrammarError) and result.lasts:
                self.kept.add_failure(task.key, copy(result))
            waiting = list(task.waiting)
        for grammar in waiting:
            if not grammar.set_running_or_notify_cancel():
                continue
            if isinstance(result, Grammar):
                grammar.set_result(result)
            else:
                grammar.set_exception(result)

    def _is_tried_again(self, task: _Task, result: object) -> bool:
        """Whether a task queues again: it may take longer at the next try, or the machine was busy
        with other work."""
        if not isinstance(result, CostlyGrammarError):
            return False
        if result.lasts:
            return isinstance(result, SlowGrammarError) and task.place + 1 < len(self._lanes)
        task.tries += 1
        return task.tries < MOST_TRIES

    def _compiled(self, task: _Task) -> Grammar:
        trials, info = self.loaded()
        wanted = task.wanted
        if wanted.tags is not None:
            check_depth(wanted.tags)
        tag = wanted.tags and with_token_ids(wanted.tags, self._tokenizer.control_token)
        asked = {
            **wanted._asdict(),
            "tags": tag,
            "is_costly": wanted.tags is not None and not is_simple(wanted.tags),
            "unchecked": not self._is_checked(task.key),
        }
        *idle, last = self.limits.paces[task.place]
        for pace in idle:
            try:
                found = self._answer(trials, task, asked, pace)
                break
            except SlowGrammarError as error:
                if error.lasts:
                    raise
        else:
            found = self._answer(trials, task, asked, last)
        self._add_checked(task.key)
        if found.serialised is not None:
            compiled = _xgrammar().CompiledGrammar.deserialize_json(found.serialised, info)
        else:
            # One cache is enough, and ours is bounded. Threads would slow steps.
            compiler = _xgrammar().GrammarCompiler(info, max_threads=1, cache_enabled=False)
            if found.ebnf is not None:
                compiled = compiler.compile_grammar(found.ebnf)
            else:
                compiled = compiler.compile_structural_tag(found.tag)
        return Grammar(compiled, self._allowed(named_tokens(tag)), found.size)

    def _answer(
        self, trials: Trials, task: _Task, asked: Mapping[str, Any], pace: Pace
    ) -> Compilable:
        """What the process of a task answers. One that died with the process that it was forked
        from is tried again."""
        for attempt in (1, 2):
            trial = trials.start(asked, task.wanted.name, pace)
            with self._lock:
                task.trial = trial
                if not task.waiting:
                    trial.end()
            try:
                return trial.answer()
            except (EOFError, OSError):
                if attempt == 2 or not task.waiting:
                    raise UnsupportedError(
                        f"{task.wanted.name} cannot be compiled: the process that does so ends, or "
                        "does not answer"
                    ) from None
        raise AssertionError

    def _allowed(self, named: Iterable[int]) -> Tensor:
        """All tokens but control tokens, unless they end an answer or are named."""
        never = self._tokenizer.special_ids.difference(self.stop_token_ids, named)
        return ~packed(never, (self.vocab_size + 31) // 32)

    def loaded(self) -> tuple[Trials, xgrammar.TokenizerInfo]:
        """The processes that compile, and the vocabulary as xgrammar has it; made once."""
        with self._loading:
            if self._loaded_once is None:
                self._loaded_once = self._load()
            return self._loaded_once

    def _load(self) -> tuple[Trials, xgrammar.TokenizerInfo]:
        xgrammar = _xgrammar()
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
        quoting = [token for token in vocabulary if b'"' in token]
        setup = {
            "tokenizer": info.serialize_json(),
            "vocab_size": self.vocab_size,
            "short": max(SHORT, longest_entry(quoting, in_json=True)),
            "short_in_tags": max(SHORT, longest_entry(quoting, in_json=False)),
        }
        return Trials(setup, self.limits), info


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise UnsupportedError(
            "response_format needs xgrammar, which is not installed: pip install xgrammar"
        ) from error
    return xgrammar

"""Grammars that take as long as a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from onestem.engine.grammar.compiler import GrammarCompiler
from onestem.engine.grammar.trial import Compilable, Pace, SlowGrammarError, Trial, Trials


class HeldTrials(Trials):
    """A compiler's processes, where a format with `word` in it fails its first try, and its second
    one goes on until `let` is set. Nothing is tried in the main thread."""

    def __init__(self, compiler: GrammarCompiler, word: str) -> None:
        self._inner, self._info = compiler.loaded()
        self._compiler = compiler
        self._word = word
        self.let = threading.Event()
        self.begun = threading.Event()
        self.names: list[str] = []  # of those that were held
        compiler.loaded = lambda: (self, self._info)

    def start(self, task: Mapping[str, Any], name: str, pace: Pace) -> Trial:
        assert threading.current_thread() is not threading.main_thread()
        if self._word not in json.dumps(task):
            return self._inner.start(task, name, pace)
        paces = self._compiler.limits.paces
        if pace in paces[0]:
            return TooSlow()
        return Held(self, self._inner.start(task, name, paces[-1][-1]))  # held as long as any

    def restore(self) -> None:
        self.let.set()
        del self._compiler.loaded

    def close(self) -> None:
        self._inner.close()


class TooSlow(Trial):
    def __init__(self) -> None:
        pass

    def end(self) -> None:
        pass

    def answer(self) -> Compilable:
        raise SlowGrammarError("too slow")


class Held(Trial):
    def __init__(self, trials: HeldTrials, inner: Trial) -> None:
        self._trials = trials
        self._inner = inner

    def end(self) -> None:
        self._inner.end()

    def answer(self) -> Compilable:
        self._trials.names.append(self._inner.name)
        self._trials.begun.set()
        assert self._trials.let.wait(60)
        return self._inner.answer()

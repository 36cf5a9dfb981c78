"""Requests that are checked beside the steps: in threads, and their grammars in processes.

So a large JSON schema delays no step and no other schema.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from onestem.engine.grammar.trial import CostlyGrammarError
from onestem.errors import OnestemError
from onestem.server.link.messages import Answered, Ask

if TYPE_CHECKING:
    from onestem.engine.engine import Engine

THREADS = 4  # requests that are checked at once


class _Check:
    """A request that is being checked for somebody, who may give up any moment."""

    def __init__(self) -> None:
        self.dropped = False
        self._grammar: Future[Any] | None = None

    def begin(self, grammar: Future[Any]) -> None:
        """Its grammar is being compiled."""
        self._grammar = grammar
        if self.dropped:  # meanwhile
            grammar.cancel()

    def drop(self) -> None:
        """Nobody waits any more."""
        self.dropped = True
        if self._grammar is not None:
            self._grammar.cancel()


class Checks:
    """Answers questions to `validate`.

    Args:
        answer: gets each answer, from any thread.
        pool: what checks run in.
    """

    def __init__(
        self, engine: Engine, answer: Callable[[Answered], object], pool: Executor | None = None
    ) -> None:
        self._engine = engine
        self._answer = answer
        self._pool = pool or ThreadPoolExecutor(THREADS, "checks")
        self._open: dict[int, _Check] = {}

    def __len__(self) -> int:
        """Number of questions that somebody waits for."""
        return len(self._open)

    def begin(self, ask: Ask) -> None:
        """Check a request, and have its grammar compiled, without waiting for either."""
        self._open[ask.token] = check = _Check()
        self._pool.submit(self._validate, ask, check)

    def drop(self, token: int) -> None:
        """Nobody waits any more for the answer to a question."""
        self._open.pop(token, _Check()).drop()

    def close(self) -> None:
        """Begin no further check."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _validate(self, ask: Ask, check: _Check) -> None:
        if check.dropped:
            return
        try:
            grammar = self._engine.requests.prepare(ask.value, ask.key, ask.weight)
        except BaseException as error:  # a library's panic is no `Exception`
            self._tell(ask.token, error)
            return
        if grammar is None:
            self._tell(ask.token, None)
        else:  # the compiler keeps it, and what it calls: not the request
            check.begin(grammar)
            grammar.add_done_callback(partial(self._compiled, ask.token))

    def _compiled(self, token: int, grammar: Future[Any]) -> None:
        if not grammar.cancelled():
            self._tell(token, grammar.exception())

    def _tell(self, token: int, error: BaseException | None) -> None:
        """Answer that a request can be answered, or why not."""
        self._open.pop(token, None)
        answer = Answered(token)
        if isinstance(error, OnestemError):
            lasts = not isinstance(error, CostlyGrammarError) or error.lasts
            answer = Answered(token, error=str(error), lasts=lasts)
        elif error is not None:  # without an answer the asker would wait for ever
            why = f"the request cannot be checked: {type(error).__name__}: {error}"
            answer = Answered(token, error=why, fault=False)
        self._answer(answer)

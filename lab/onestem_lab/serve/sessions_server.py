"""A server whose model answers as it is told, and which writes down what its engine computed.

    python -m onestem_lab.serve.sessions_server serve ...    # options as of `onestem serve`

A request's `seed` names the answer in the file `$ONESTEM_SCRIPTS`; its tokens are the only ones
that may be sampled, one after the other. What the server would have held the answer to holds too: a
script that the grammar of the tools does not allow ends the request with an error. A line for each
request that has ended is pickled to `$ONESTEM_TOLD`.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from onestem.engine.engine import Engine
from onestem.engine.grammar.state import packed
from onestem.options import EngineOptions
from onestem.request import Request

__all__ = ["SCRIPTS", "TOLD", "Told", "load", "told"]

SCRIPTS, TOLD = "ONESTEM_SCRIPTS", "ONESTEM_TOLD"


@dataclass(frozen=True)
class Told:
    """What the engine knows of a request that has ended.

    Attributes:
        prompt, answer: token ids; the answer's as they were sampled.
        prefilled: tokens at the prompt's end that later prompts do not have there.
        cached, computed: tokens of the prompt.
        begun, ended: seconds of `time.monotonic()`: when its prompt was looked for in the cache,
            and when its answer was whole.
    """

    request_id: str
    prompt: array[int]
    answer: array[int]
    prefilled: int
    cached: int
    computed: int
    begun: float
    ended: float


def told(path: Path) -> Iterator[Told]:
    """What was written down so far."""
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return


class _Script:
    """The next tokens of a sequence, in a grammar's place.

    Args:
        inner: the grammar that the tokens must be allowed by, if there is one.
    """

    def __init__(self, ids: Sequence[int], inner: Any, vocab_size: int) -> None:
        self._ids, self._inner, self._at = ids, inner, 0
        self._words = (vocab_size + 31) // 32

    def at_start(self) -> _Script:
        inner = None if self._inner is None else self._inner.at_start()
        return _Script(self._ids, inner, 32 * self._words)

    def fill_mask(self) -> Tensor:
        return packed([self._ids[self._at]], self._words)

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        self._at += 1

    @property
    def is_finished(self) -> bool:
        return self._at == len(self._ids)


def load(options: EngineOptions) -> Engine:
    """The engine of a server, which answers as it is told."""
    from onestem.server.link.worker import load as load_engine

    engine = load_engine(options)
    factory = engine.requests.factory
    requests: dict[str, Request] = {}
    begun: dict[str, float] = {}
    scripts = dict(enumerate(json.loads(Path(os.environ[SCRIPTS]).read_text())))
    own, add, step = factory._grammar_of, engine.add_request, engine.step_news

    def scripted(state: Any) -> Any:
        # With room for all, a request that is opened is admitted at once.
        begun[state.request.request_id] = time.monotonic()
        ids = scripts.get(state.request.params.seed)
        grammar = own(state)
        if not ids:
            return grammar
        return _Script(ids, grammar, engine.weights.decoder.config.vocab_size)

    def added(request: Request, **more: Any) -> None:
        requests[request.request_id] = request
        add(request, **more)

    def stepped() -> tuple[Any, Any]:
        outputs, going_on = step()
        with open(os.environ[TOLD], "ab") as file:
            for output in outputs:
                request = requests.pop(output.request_id, None)
                if request is not None and output.finished:
                    pickle.dump(_told(request, output, begun.pop(request.request_id)), file)
        return outputs, going_on

    factory._grammar_of = scripted  # type: ignore[method-assign]
    engine.add_request = added  # type: ignore[method-assign, assignment]
    engine.step_news = stepped  # type: ignore[method-assign]
    return engine


def _told(request: Request, output: Any, begun: float) -> Told:
    metrics, (answer,) = output.metrics, output.outputs
    return Told(
        request.request_id,
        array("i", request.prompt_token_ids),
        array("i", answer.token_ids),
        request.prefilled_tokens,
        metrics.num_cached_tokens,
        metrics.num_computed_tokens,
        begun,
        metrics.finished_time or 0.0,
    )


def main() -> None:
    from onestem.cli import main as onestem
    from onestem.server import run

    run.EngineProcess = partial(  # type: ignore[misc, assignment]
        run.EngineProcess, factory="onestem_lab.serve.sessions_server:load"
    )
    onestem()


if __name__ == "__main__":
    main()

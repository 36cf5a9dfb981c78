"""Answers as callers in Python get them: whole or in pieces, with texts of log-probabilities."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Generator, Iterator, Mapping
from typing import Literal

from onestem.checked import show
from onestem.engine.engine import Engine
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import OnestemError, RequestError
from onestem.request import Answer, Logprob, Logprobs, RankedLogprobs, RequestOutput, Told
from onestem.scores import PathScores

OutputKind = Literal["cumulative", "delta"]


def check_output_kind(kind: object) -> None:
    """Raise `RequestError` for what is no `OutputKind`."""
    if kind not in ("cumulative", "delta"):
        raise RequestError(f"output_kind is {show(kind)}, expected cumulative or delta")


def in_pieces(outputs: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
    """Growing outputs, each reduced to what is new in it."""
    told: dict[str, dict[int, Told]] = {}
    for output in outputs:
        known = told.setdefault(output.request_id, {})
        pieces = [known.setdefault(one.index, Told()).news(one) for one in output.outputs]
        if output.finished:
            del told[output.request_id]
        yield dataclasses.replace(output, outputs=[one for one in pieces if one is not None])


def with_texts(tokenizer: Tokenizer | None, entry: Mapping[int, float]) -> Logprobs:
    """A token's entry with ranks and texts. All but the last are the leading ones, in order."""
    assert isinstance(entry, RankedLogprobs)
    count = len(entry)
    ranks = [*range(1, count), max(count, entry.rank)]
    texts = [None] * count if tokenizer is None else map(tokenizer.token_text, entry)
    made = map(Logprob, entry.values(), ranks, texts)
    return dict(zip(entry, made, strict=True))


def path_scores(output: RequestOutput) -> list[PathScores]:
    """The scores of a request with paths.

    Raises:
        OnestemError: the engine could not compute them.
    """
    if output.scores is None:
        reasons = [one.stop_reason for one in output.outputs if one.stop_reason is not None]
        raise OnestemError(f"no scores: {reasons[0] if reasons else 'the request was ended'}")
    return output.scores


class AwakeAnswers(Iterator[Answer]):
    """Answers of an engine, refused while it sleeps. A generator that raises would have ended."""

    def __init__(self, engine: Engine, answers: Generator[Answer]) -> None:
        self._engine = weakref.ref(engine)  # an LLM that is closed lets it go
        self._answers = answers
        self._has_begun = False

    def __next__(self) -> Answer:
        engine = self._engine()
        if engine is not None and (not self._has_begun or engine.has_unfinished()):
            engine.weights.check_ready()
        del engine
        self._has_begun = True
        return next(self._answers)

    def close(self) -> None:
        """End what is unfinished."""
        self._answers.close()

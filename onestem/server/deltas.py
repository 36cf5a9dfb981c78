"""Cumulative outputs -> what is new in them, so that a message's size is that of its news."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onestem.engine.outputs import request_output
from onestem.engine.sequence import RequestState, Sequence
from onestem.request import CompletionOutput, RequestOutput
from onestem.server.messages import Delta, Tokens

__all__ = ["Deltas"]


class _Sent:
    """How much of one sequence's answer has been sent."""

    __slots__ = ("ended", "text", "tokens")

    def __init__(self) -> None:
        self.text = 0
        self.tokens = 0
        self.ended = False


@dataclass(slots=True)
class _Single:
    """A request whose news are mostly plain: its only sequence, its number, what was sent."""

    sequence: Sequence
    number: int
    sent: _Sent


class Deltas:
    """Remembers what was sent of the requests that are being answered."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._single: dict[str, _Single] = {}
        self._sent: dict[str, dict[int, _Sent]] = {}

    def __len__(self) -> int:
        """Requests that are being answered."""
        return len(self._sent)

    def begin(self, request_id: str, number: int) -> None:
        self._numbers[request_id], self._sent[request_id] = number, {}

    def forget(self, request_id: str) -> None:
        self._numbers.pop(request_id, None)
        self._single.pop(request_id, None)
        self._sent.pop(request_id, None)

    def of(
        self, outputs: Iterable[RequestOutput], going_on: Iterable[RequestState] = ()
    ) -> tuple[Tokens, list[Delta]]:
        """What requests have that they did not have before: those of `outputs`, and others that
        stream and go on."""
        tokens = Tokens()
        unusual = self._note_tokens(going_on, tokens)
        deltas = []
        for output in [*outputs, *map(request_output, unusual)]:
            if output.request_id not in self._sent:
                continue  # it was forgotten: nobody listens
            pieces = self._pieces(output, tokens)
            if output.finished:
                deltas.append(_last(output, pieces))
                self.forget(output.request_id)
            elif pieces:
                deltas.append(Delta(output.request_id, pieces))
        return tokens, deltas

    def _note_tokens(self, going_on: Iterable[RequestState], tokens: Tokens) -> list[RequestState]:
        """Note the news of requests of one sequence if it is a token with nothing but a text. That
        is most of what comes, so no output is made for it. The other requests."""
        unusual: list[RequestState] = []
        numbers: list[int] = []
        ids: list[int] = []
        for state in going_on:
            one = self._single.get(state.request.request_id) or self._begin_single(state)
            if one is None:
                unusual.append(state)
                continue
            sequence, sent = one.sequence, one.sent
            sampled, text = sequence.tokens, sequence.text
            if len(sampled) - sequence.num_prompt != sent.tokens + 1:
                unusual.append(state)
                continue
            numbers.append(one.number)
            ids.append(sampled[-1])
            tokens.texts.append(text[sent.text :])
            sent.tokens, sent.text = sent.tokens + 1, len(text)
        tokens.requests.extend(numbers)
        tokens.indices.extend([0] * len(numbers))
        tokens.token_ids.extend(ids)
        return unusual

    def _begin_single(self, state: RequestState) -> _Single | None:
        """If it is a request of one sequence that is heard of here."""
        request_id = state.request.request_id
        if request_id not in self._sent or not _is_single(state):
            return None
        sent = self._sent[request_id].setdefault(0, _Sent())
        one = _Single(state.sequences[0], self._numbers[request_id], sent)
        self._single[request_id] = one
        return one

    def _pieces(self, output: RequestOutput, tokens: Tokens) -> list[CompletionOutput]:
        """What does not go into `tokens`."""
        pieces = []
        sent = self._sent[output.request_id]
        for sequence in output.outputs:
            before = sent.get(sequence.index)
            if before is None:
                before = sent[sequence.index] = _Sent()
            if _is_plain(sequence, before):
                tokens.requests.append(self._numbers[output.request_id])
                tokens.indices.append(sequence.index)
                tokens.token_ids.append(sequence.token_ids[-1])
                tokens.texts.append(sequence.text[before.text :])
                before.tokens, before.text = before.tokens + 1, len(sequence.text)
            elif (piece := _piece(sequence, before)) is not None:
                pieces.append(piece)
        return pieces


def _is_single(state: RequestState) -> bool:
    params = state.request.params
    return len(state.sequences) == 1 == params.n and params.logprobs is None and not params.choices


def _is_plain(sequence: CompletionOutput, sent: _Sent) -> bool:
    """Whether its news is a token with nothing but a text."""
    return (
        sequence.finish_reason is None
        and sequence.logprobs is None
        and len(sequence.token_ids) == sent.tokens + 1
    )


def _last(output: RequestOutput, pieces: list[CompletionOutput]) -> Delta:
    return Delta(
        output.request_id,
        pieces,
        finished=True,
        metrics=output.metrics,
        prompt_logprobs=output.prompt_logprobs,
        reuse=output.reuse,
    )


def _piece(sequence: CompletionOutput, sent: _Sent) -> CompletionOutput | None:
    if sent.ended or (
        sequence.finish_reason is None
        and len(sequence.token_ids) == sent.tokens
        and len(sequence.text) == sent.text
    ):
        return None
    piece = CompletionOutput(
        index=sequence.index,
        text=sequence.text[sent.text :],
        token_ids=sequence.token_ids[sent.tokens :],
        logprobs=None if sequence.logprobs is None else sequence.logprobs[sent.tokens :],
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        choice=sequence.choice,
    )
    sent.text, sent.tokens = len(sequence.text), len(sequence.token_ids)
    sent.ended = sequence.finish_reason is not None
    return piece

"""Cumulative outputs -> what is new in them, so that a message's size is that of its news."""

from __future__ import annotations

from collections.abc import Iterable

from onestem.engine.outputs import request_output
from onestem.engine.sequence import RequestState
from onestem.request import CompletionOutput, RequestOutput
from onestem.server.messages import Delta, Piece, Tokens

__all__ = ["Deltas"]


class _Sent:
    """How much of one sequence's answer has been sent."""

    __slots__ = ("ended", "text", "tokens")

    def __init__(self) -> None:
        self.text = 0
        self.tokens = 0
        self.ended = False


class Deltas:
    """Remembers what was sent of the requests that are being answered."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._sent: dict[str, dict[int, _Sent]] = {}

    def __len__(self) -> int:
        """Requests that are being answered."""
        return len(self._sent)

    def begin(self, request_id: str, number: int) -> None:
        self._numbers[request_id], self._sent[request_id] = number, {}

    def forget(self, request_id: str) -> None:
        self._numbers.pop(request_id, None)
        self._sent.pop(request_id, None)

    def of(
        self, outputs: Iterable[RequestOutput], going_on: Iterable[RequestState] = ()
    ) -> tuple[Tokens, list[Delta]]:
        """What requests have that they did not have before: those of `outputs`, and others that
        stream and go on."""
        tokens = Tokens()
        unusual = [state for state in going_on if not self._is_token(state, tokens)]
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

    def _is_token(self, state: RequestState, tokens: Tokens) -> bool:
        """Whether a request's news is a token of its only sequence, with nothing but a text; it is
        noted then. What most of them have, so no output is made for it."""
        request, sequence = state.request, state.sequences[0]
        sent = self._sent.get(request.request_id)
        if sent is None:
            return True  # it was forgotten: nobody listens
        before = sent.get(0)
        if before is None:
            before = sent[0] = _Sent()
        if len(state.sequences) > 1 or request.params.logprobs is not None:
            return False
        if request.params.choices or sequence.num_output != before.tokens + 1:
            return False
        tokens.requests.append(self._numbers[request.request_id])
        tokens.indices.append(0)
        tokens.token_ids.append(sequence.tokens[-1])
        tokens.texts.append(sequence.text[before.text :])
        before.tokens, before.text = before.tokens + 1, len(sequence.text)
        return True

    def _pieces(self, output: RequestOutput, tokens: Tokens) -> list[Piece]:
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


def _is_plain(sequence: CompletionOutput, sent: _Sent) -> bool:
    """Whether its news is a token with nothing but a text."""
    return (
        sequence.finish_reason is None
        and sequence.logprobs is None
        and len(sequence.token_ids) == sent.tokens + 1
    )


def _last(output: RequestOutput, pieces: list[Piece]) -> Delta:
    return Delta(
        output.request_id,
        pieces,
        finished=True,
        metrics=output.metrics,
        prompt_logprobs=output.prompt_logprobs,
        reuse=output.reuse,
    )


def _piece(sequence: CompletionOutput, sent: _Sent) -> Piece | None:
    if sent.ended or (
        sequence.finish_reason is None
        and len(sequence.token_ids) == sent.tokens
        and len(sequence.text) == sent.text
    ):
        return None
    piece = Piece(
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

"""Cumulative outputs -> what is new in them, so that a message's size is that of its news."""

from __future__ import annotations

from onestem.request import CompletionOutput, RequestOutput
from onestem.server.messages import Delta, Piece

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
        self._sent: dict[str, dict[int, _Sent]] = {}

    def of(self, output: RequestOutput) -> Delta:
        """What `output` has that the outputs of its request before did not have."""
        sent = self._sent.setdefault(output.request_id, {})
        pieces = []
        for sequence in output.outputs:
            piece = _piece(sequence, sent.setdefault(sequence.index, _Sent()))
            if piece is not None:
                pieces.append(piece)
        if not output.finished:
            return Delta(output.request_id, pieces)
        del self._sent[output.request_id]
        return Delta(
            output.request_id,
            pieces,
            finished=True,
            metrics=output.metrics,
            prompt_logprobs=output.prompt_logprobs,
            reuse=getattr(output, "reuse", None),
        )

    def forget(self, request_id: str) -> None:
        self._sent.pop(request_id, None)


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

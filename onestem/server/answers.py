"""Answers in OpenAI's shapes: whole bodies, and the chunks of a stream.

A chunk says what is new. Whole bodies are written by `onestem.batch.results`, as in batches.
"""

from __future__ import annotations

from typing import Any

from onestem.batch.results import (
    NotANumberError,
    Spelling,
    answer_body,
    chat_logprobs,
    completion_logprobs,
)
from onestem.request import RequestOutput
from onestem.server.calls import Call, usage_of
from onestem.server.errors import ApiError
from onestem.server.messages import Piece

__all__ = ["Chunks", "check_piece", "whole_body"]


def check_piece(piece: Piece, call: Call) -> None:
    """Raise what the engine said of a sequence that it could not continue."""
    if piece.finish_reason != "error":
        return
    message = piece.stop_reason if isinstance(piece.stop_reason, str) else "the engine failed"
    asked_for_it = call.requests[0].params.response_format is not None
    raise ApiError(400 if asked_for_it else 500, message, code="engine_error")


def whole_body(
    call: Call, pieces: dict[tuple[int, int], Piece], spelling: Spelling
) -> dict[str, Any]:
    """The body of a call that is answered: the choices of its prompts one after the other."""
    bodies = []
    for part, request in enumerate(call.requests):
        output = RequestOutput(
            request_id=request.request_id,
            prompt=None,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[piece.as_output() for (of, _), piece in pieces.items() if of == part],
            finished=True,
            prompt_logprobs=call.inbox.ended[part].prompt_logprobs,
        )
        bodies.append(_spelled(lambda output=output: answer_body("", output, spelling)))
    body: dict[str, Any] = bodies[0]
    body["choices"] = [choice for one in bodies for choice in one["choices"]]
    for index, choice in enumerate(body["choices"]):
        choice["index"] = index
    return body | {"id": call.id, "created": call.created, "usage": usage_of(call)}


def _spelled(write: Any) -> Any:
    try:
        return write()
    except NotANumberError as error:
        raise ApiError(500, str(error), code="engine_error") from error


class Chunks:
    """Writes the chunks of one call's stream."""

    def __init__(self, call: Call, spelling: Spelling) -> None:
        self._call = call
        self._spelling = spelling
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()
        self._head = {
            "id": call.id,
            "object": "chat.completion.chunk" if call.kind == "chat" else "text_completion",
            "created": call.created,
            "model": call.model,
        }

    def chunk(self, part: int, piece: Piece) -> dict[str, Any] | None:
        """The chunk of a piece; None if there is nothing to show."""
        check_piece(piece, self._call)
        index = part * self._call.requests[0].params.n + piece.index
        first = index not in self._begun
        silent = not piece.text and self._spelling.logprobs is None
        if silent and not first and not piece.finish_reason and not self._spelling.return_token_ids:
            return None
        self._begun.add(index)
        write = self._chat if self._call.kind == "chat" else self._completion
        choice = {
            "index": index,
            **_spelled(lambda: write(piece, index, first)),
            "finish_reason": piece.finish_reason,
        }
        if piece.choice is not None:
            choice["choice"] = piece.choice
        if self._spelling.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return self._chunk([choice])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._call.include_usage:
            chunk["usage"] = None
        return chunk

    def usage(self) -> dict[str, Any]:
        """The last chunk, if it was asked for."""
        return self._chunk([]) | {"usage": usage_of(self._call)}

    def _chat(self, piece: Piece, index: int, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        text = {"content": piece.text} if piece.text or first else {}
        return {"delta": role | text, "logprobs": chat_logprobs(piece.as_output(), self._spelling)}

    def _completion(self, piece: Piece, index: int, first: bool) -> dict[str, Any]:
        logprobs = completion_logprobs(piece.as_output(), self._spelling)
        if logprobs is not None:
            offset = self._offsets.get(index, 0)
            logprobs["text_offset"] = [offset + at for at in logprobs["text_offset"]]
            self._offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        return {"text": piece.text, "logprobs": logprobs}

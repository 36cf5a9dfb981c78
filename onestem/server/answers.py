"""Answers in OpenAI's shapes: whole bodies, and the chunks of a stream.

A chunk says what is new. Whole bodies are written by `onestem.batch.results`, as in batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from onestem.batch.results import (
    NotANumberError,
    ResponseFormat,
    answer_body,
    chat_logprobs,
    completion_logprobs,
)
from onestem.request import CompletionOutput, RequestOutput, is_masked, masking_fields
from onestem.server.calls import Call, usage_of
from onestem.server.errors import ApiError

__all__ = ["Chunks", "check_piece", "whole_body"]

# Characters above ASCII are escaped: no reader can take one for a line end.
_json = json.JSONEncoder(separators=(",", ":")).encode


def check_piece(piece: CompletionOutput, call: Call) -> None:
    """Raise what the engine said of a sequence that it could not continue."""
    if piece.finish_reason != "error":
        return
    message = piece.stop_reason if isinstance(piece.stop_reason, str) else "the engine failed"
    if is_masked(message):
        param = masking_fields(call.requests[0].params)[0]
        raise ApiError(400, message, param=param, code="invalid_request")
    raise ApiError(500, message, code="engine_error")


def whole_body(
    call: Call, pieces: dict[tuple[int, int], CompletionOutput], form: ResponseFormat
) -> dict[str, Any]:
    """The body of a call that is answered: the choices of its prompts one after the other."""
    bodies = []
    for part, request in enumerate(call.requests):
        output = RequestOutput(
            request_id=request.request_id,
            prompt=None,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[piece for (of, _), piece in pieces.items() if of == part],
            finished=True,
            prompt_logprobs=call.inbox.ended[part].prompt_logprobs,
        )
        bodies.append(_spelled(lambda output=output: answer_body("", output, form)))
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
    """Writes the events of one call's stream.

    What all of them have in common is written once: a stream has an event for each token.
    """

    def __init__(self, call: Call, form: ResponseFormat) -> None:
        self._call = call
        self._form = form
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()
        self._is_chat = call.kind == "chat"
        head = {
            "id": call.id,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": call.created,
            "model": call.model,
        }
        self._head = f'data: {_json(head)[:-1]},"choices":['
        self._end = ',"usage":null}\n\n' if call.include_usage else "}\n\n"

    def events(self, pieces: Mapping[tuple[int, int], CompletionOutput]) -> bytes:
        """One event for each of (part, sequence) that has something to show."""
        return "".join([self._event(part, piece) for (part, _), piece in pieces.items()]).encode()

    def usage(self) -> bytes:
        """The last event, if it was asked for."""
        return f'{self._head}],"usage":{_json(usage_of(self._call))}}}\n\n'.encode()

    def _event(self, part: int, piece: CompletionOutput) -> str:
        check_piece(piece, self._call)
        index = part * self._call.requests[0].params.n + piece.index
        first = index not in self._begun
        form = self._form
        silent = not piece.text and form.logprobs is None and not form.return_token_ids
        if silent and not first and not piece.finish_reason:
            return ""
        self._begun.add(index)
        news = self._chat(piece, first) if self._is_chat else self._completion(piece, index)
        reason = f'"{piece.finish_reason}"' if piece.finish_reason else "null"
        choice = f'"choice":{piece.choice},' if piece.choice is not None else ""
        ids = (
            f',"token_ids":[{",".join(map(str, piece.token_ids))}]' if form.return_token_ids else ""
        )
        return (
            f'{self._head}{{"index":{index},{choice}{news},"finish_reason":{reason}{ids}}}]'
            f"{self._end}"
        )

    def _chat(self, piece: CompletionOutput, first: bool) -> str:
        role = '"role":"assistant",' if first else ""
        text = f'"content":{_json(piece.text)}' if piece.text or first else ""
        logprobs = "null"
        if self._form.logprobs is not None:
            logprobs = _json(_spelled(lambda: chat_logprobs(piece, self._form)))
        return f'"delta":{{{role}{text}}},"logprobs":{logprobs}'

    def _completion(self, piece: CompletionOutput, index: int) -> str:
        logprobs = "null"
        if self._form.logprobs is not None:
            logprobs = _json(_spelled(lambda: self._completion_logprobs(piece, index)))
        return f'"text":{_json(piece.text)},"logprobs":{logprobs}'

    def _completion_logprobs(self, piece: CompletionOutput, index: int) -> dict[str, Any] | None:
        logprobs = completion_logprobs(piece, self._form)
        if logprobs is not None:
            offset = self._offsets.get(index, 0)
            logprobs["text_offset"] = [offset + at for at in logprobs["text_offset"]]
            self._offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        return logprobs

"""A call's answer, whole or as chunks, or the error that it has in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onestem.openai.write import Chunks, NotANumberError, ResponseFormat, answer_body, echoed
from onestem.request import CompletionOutput, RequestOutput, is_masked, masking_fields
from onestem.server.calls import Call, usage_of
from onestem.server.errors import ApiError

__all__ = ["check_piece", "events", "whole_body"]


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
        outputs = [piece for (of, _), piece in pieces.items() if of == part]
        prompt_logprobs = call.inbox.ended[part].prompt_logprobs
        if call.echo is not None:
            ids, text = request.prompt_token_ids, request.prompt or ""
            outputs = [
                echoed(piece, text, ids, prompt_logprobs, alone=call.echo.alone)
                for piece in outputs
            ]
            prompt_logprobs = None
        output = RequestOutput(
            request_id=request.request_id,
            prompt=None,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=True,
            prompt_logprobs=prompt_logprobs,
        )
        bodies.append(_spelled(lambda output=output: answer_body(call.id, output, form)))
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


def events(call: Call, pieces: Mapping[tuple[int, int], CompletionOutput], chunks: Chunks) -> bytes:
    """The events of a stream for what has come."""
    for piece in pieces.values():
        check_piece(piece, call)
    return _spelled(lambda: chunks.events(pieces))

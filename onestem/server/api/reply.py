"""A call becomes bytes: its answer as one body, or as events while it comes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import starmap
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from onestem.batch.guard import ENDS
from onestem.openai.echo import echoed, form_of_echo
from onestem.openai.write import (
    Chunks,
    Dialect,
    DialectWriter,
    NotANumberError,
    ResponseFormat,
    answer_body,
    reasoning_tokens,
    scores_body,
    scores_of,
)
from onestem.request import CompletionOutput, RequestOutput, is_masked, masking_fields
from onestem.server.api.calls import Call, usage_of
from onestem.server.api.half_open import HalfOpenProtocol
from onestem.server.api.prepare import QUICK_TOKENS
from onestem.server.api.streams import (
    DONE,
    EventStream,
    event,
    piece_writer,
    while_there,
)
from onestem.server.errors import BUG, ApiError, field_of
from onestem.server.link.inbox import Inbox
from onestem.server.logs import log
from onestem.server.service import Service

PING_SECONDS = 15.0
SLOW_READER_SECONDS = 60.0  # time for a reader to take the rest after the deadline
CLIENT_GONE = 499  # as proxies write it in their logs; it is never sent


class Reply:
    """The answer to a call, which is recorded when it has ended."""

    def __init__(self, call: Call, service: Service) -> None:
        self._call = call
        self._client = service.client
        self._records = service.records
        params, tokenizer = call.requests[0].params, service.model.tokenizer
        self._form = ResponseFormat(
            kind=call.kind,
            model=call.model,
            logprobs=params.logprobs,
            return_token_ids=call.return_token_ids,
            token_bytes=None if tokenizer is None else tokenizer.token_bytes,
            first_token_bytes=None if tokenizer is None else tokenizer.first_token_bytes,
            reading=call.reading,
            special_ids=frozenset() if tokenizer is None else tokenizer.special_ids,
            skips_special=params.skip_special_tokens,
        )

    async def response(self, http: HttpRequest) -> Response:
        """Submit the call; the response, whole or as a stream. A client that goes away ends it.

        Raises:
            ApiError: the engine does not take it, fails, or has not answered in time, before
                anything was sent.
        """
        call, headers = self._call, {"x-request-id": self._call.id}
        call.submit(self._client)
        if not call.stream:
            return await self._whole(http, headers)
        patience = call.deadline - time.monotonic() + SLOW_READER_SECONDS
        stream = self.events(piece_writer(http.scope), http.state.fields)
        return EventStream(stream, seconds=patience, headers=headers)

    async def _whole(self, http: HttpRequest, headers: dict[str, str]) -> Response:
        """The answer as one body; if the client goes away, nothing runs on for it."""
        body = await while_there(self._body(headers), http.receive)
        try:
            return Response(status_code=CLIENT_GONE) if body.cancelled() else body.result()
        finally:
            del body  # an error of the body has this frame, and must not be in it

    async def _body(self, headers: dict[str, str]) -> Response:
        call = self._call
        try:
            async with call.running(self._client) as inbox:
                pieces = await inbox.whole()
                for piece in pieces.values():
                    check_piece(piece, call)
            tokens = sum(len(piece.token_ids) for piece in pieces.values())
            if tokens * (1 + (self._form.logprobs or 0)) <= QUICK_TOKENS:
                return self._written(pieces, headers)
            return await asyncio.to_thread(self._written, pieces, headers)
        finally:
            self._note()

    def _written(
        self, pieces: dict[tuple[int, int], CompletionOutput], headers: dict[str, str]
    ) -> Response:
        return JSONResponse(whole_body(self._call, pieces, self._form), headers=headers)

    async def events(
        self, writer: HalfOpenProtocol | None, fields: Collection[str]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream. What goes wrong after its head was sent is an event too.

        Args:
            writer: takes events past this generator while it waits for news; None: there is none.
            fields: of the body.
        """
        call = self._call
        chunks = _chunks(call, self._form)
        direct = _direct(call, chunks, writer)
        last = b""
        try:
            async with call.running(self._client) as inbox:
                while not inbox.drained:
                    if last:
                        yield last
                        inbox.direct = direct
                    while not await _has_come(inbox, chunks):
                        yield chunks.ping
                    last = events(call, inbox.take(), chunks)
            if call.include_usage:
                told = call.inbox.taken
                count = partial(_num_thought, call, self._form, told)
                is_quick = sum(len(ids) for ids, _ in told) <= QUICK_TOKENS
                thought = count() if is_quick else await asyncio.to_thread(count)
                last += chunks.usage(usage_of(call, thought))
        except (*ENDS, asyncio.CancelledError):
            raise
        except BaseException as failure:
            if isinstance(failure, ApiError):
                error, last = failure, _unsent(chunks, call)
            else:
                log.exception("internal_error", failure, id=call.id)
                error, last = ApiError(500, BUG), b""
            self._records.metrics.note_error(error.status)
            error.param = field_of(error.param, fields)
            last += _failure(error, chunks)
            del error  # which has this frame
        finally:
            call.inbox.direct = None  # calls outlive their connections for a while
            self._note()
        # In one write: each is a system call, and every request has this end.
        yield last + (DONE if call.dialect is None else b"")

    def _note(self) -> None:
        """Have the call entered when the engine is done with it."""
        call = self._call
        call.took = time.monotonic() - call.arrived
        call.when_left(partial(self._records.note, call))


def _chunks(call: Call, form: ResponseFormat) -> Chunks | DialectWriter:
    """What writes a call's stream."""
    if call.dialect is not None:
        return _writer(call, call.dialect, form)
    return Chunks(
        call.id,
        call.created,
        form,
        prompts=[request.prompt_token_ids for request in call.requests],
        n=call.requests[0].params.n,
        include_usage=call.include_usage,
    )


def _writer(call: Call, dialect: Dialect, form: ResponseFormat) -> DialectWriter:
    return dialect.writer(call.id, call.created, form, partial(usage_of, call))


async def _has_come(inbox: Inbox, chunks: Chunks | DialectWriter) -> bool:
    """Wait for news; False: there is none yet, and the reader is to be told that it is waited
    for."""
    if not chunks.ping:
        await inbox.wait()
        return True
    try:
        async with asyncio.timeout(PING_SECONDS):
            await inbox.wait()
    except TimeoutError:
        return False
    return True


def _failure(error: ApiError, chunks: Chunks | DialectWriter) -> bytes:
    """The event of an error."""
    if isinstance(chunks, Chunks):
        return event(error.body())
    return chunks.failed(error.status, error.message)


def _direct(
    call: Call, chunks: Chunks | DialectWriter, writer: HalfOpenProtocol | None
) -> Callable[[int, str], bool] | None:
    """A function that writes a token's event at once; None where events need more."""
    if writer is None or len(call.requests) * call.requests[0].params.n > 1:
        return None

    def write(token_id: int, text: str) -> bool:
        if not writer.is_free:
            return False
        if data := chunks.token(token_id, text):
            writer.write_piece(data)
        return True

    return write


def _unsent(chunks: Chunks | DialectWriter, call: Call) -> bytes:
    """Events of tokens that waited for a chunk's others when the stream was cut short."""
    with contextlib.suppress(ApiError):  # another error is reported already
        return events(call, call.inbox.take(), chunks)
    return b""


def check_piece(piece: CompletionOutput, call: Call) -> None:
    """Raise the engine's error, if it could not continue a sequence."""
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
    """The body of an answered call: the choices of its prompts one after the other."""
    whole = {"id": call.id, "created": call.created}
    if call.tasks:
        answered = zip(call.tasks, (delta.scores for delta in call.deltas), strict=True)
        if call.ranking is not None:
            ranked = partial(call.ranking.body, call.id, call.created, call.model)
            return _spelled(lambda: ranked(list(starmap(scores_of, answered)), usage_of(call)))
        scores = _spelled(lambda: scores_body(call.id, call.model, answered))
        return {**scores, **whole, "usage": usage_of(call)}
    if call.dialect is not None:
        (piece,) = pieces.values()
        thought = _num_thought(call, form, [(piece.token_ids, piece.text)])
        return _writer(call, call.dialect, form).whole(piece, usage_of(call, thought))
    bodies = []
    for part, request in enumerate(call.requests):
        outputs = [piece for (of, _), piece in pieces.items() if of == part]
        prompt_logprobs, own = call.ended[part].prompt_logprobs, form
        if call.echo is not None:
            ids, text = request.prompt_token_ids, request.prompt or ""
            outputs = [
                echoed(piece, text, ids, prompt_logprobs, alone=call.echo.alone)
                for piece in outputs
            ]
            prompt_logprobs = None
            own = form_of_echo(form, text, ids, spells_control=call.echo.spells_control)
        output = RequestOutput(
            request_id=request.request_id,
            prompt=None,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=True,
            prompt_logprobs=prompt_logprobs,
        )
        bodies.append(_spelled(partial(answer_body, call.id, output, own)))
        if form.return_token_ids and len(call.requests) > 1:
            ids = bodies[-1].pop("prompt_token_ids")
            for choice in bodies[-1]["choices"]:
                choice["prompt_token_ids"] = ids
    body: dict[str, Any] = bodies[0]
    body["choices"] = [choice for one in bodies for choice in one["choices"]]
    for index, choice in enumerate(body["choices"]):
        choice["index"] = index
    details = body["usage"].get("completion_tokens_details", {})
    return {**body, **whole, "usage": usage_of(call, **details)}


def _num_thought(
    call: Call, form: ResponseFormat, told: Sequence[tuple[Sequence[int], str]]
) -> int:
    """Tokens of reasoning in answers, given by their token ids and texts."""
    return reasoning_tokens(form, call.requests[0].prompt_token_ids, told)


def _spelled(write: Any) -> Any:
    try:
        return write()
    except NotANumberError as error:
        raise ApiError(500, str(error), code="engine_error") from error


def events(
    call: Call,
    pieces: Mapping[tuple[int, int], CompletionOutput],
    chunks: Chunks | DialectWriter,
) -> bytes:
    """The events of a stream for what has come."""
    for piece in pieces.values():
        check_piece(piece, call)
    return _spelled(lambda: chunks.events(pieces))

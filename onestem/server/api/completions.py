"""/v1/chat/completions, /v1/completions and /v1/score: from a body to its answer."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from onestem.batch.guard import ENDS
from onestem.batch.spool import NO_TOKENIZER
from onestem.checked import check, without_nulls
from onestem.engine.grammar.schema import check_schema
from onestem.engine.text.bounded import BoundedTokenizer
from onestem.engine.text.limits import MOST_CHARACTERS
from onestem.errors import RequestError
from onestem.openai.echo import echoed, form_of_echo
from onestem.openai.read import Asked, Prompt, read_body, read_conversation, read_object
from onestem.openai.schema import DetokenizeBody, Kind, TokenizeBody
from onestem.openai.write import (
    Chunks,
    NotANumberError,
    ResponseFormat,
    answer_body,
    scores_body,
)
from onestem.rawtext import RawText
from onestem.request import CompletionOutput, Request, RequestOutput, is_masked, masking_fields
from onestem.scores import ScoreTask
from onestem.server.api.calls import Call, usage_of
from onestem.server.api.http import (
    DONE,
    EventStream,
    PieceWriter,
    check_media_type,
    disconnected,
    event,
    piece_writer,
)
from onestem.server.errors import BUG, ApiError, NoAnswerError, field_of, too_late
from onestem.server.link.client import ANSWER_SECONDS
from onestem.server.logs import log
from onestem.server.objects.prefixes import Prefix, messages_of
from onestem.server.objects.tenants import APP_OWNER, Tenant

if TYPE_CHECKING:
    from onestem.server.service import Service

__all__ = ["answer", "check_piece", "detokenize", "events", "read_noted", "tokenize", "whole_body"]

SLOW_READER_SECONDS = 60.0  # time for a reader to take the rest after the deadline
# Token ids that are checked, or written with their alternatives, on the event loop; checks take
# less than a millisecond.
QUICK_TOKENS = 8192
TOKENIZED_LENGTHS = 4  # times the model's: by how much a text is too long can be asked
ID_OF: Mapping[Kind, str] = {"chat": "chatcmpl-", "completion": "cmpl-", "score": "score-"}
CLIENT_GONE = 499  # as proxies write it in their logs; it is never sent


def read_noted(http: HttpRequest, data: bytes) -> dict[str, Any]:
    """A body's JSON object. Its fields are noted: errors name no others."""
    body = read_object(data)
    http.state.fields = frozenset(body)
    return body


async def answer(service: Service, kind: Kind, http: HttpRequest, tenant: Tenant) -> Response:
    """Answer a call, whole or as a stream."""
    call = await _submitted(service, kind, http, tenant)
    headers = {"x-request-id": call.id}
    if call.stream:
        patience = call.deadline - time.monotonic() + SLOW_READER_SECONDS
        writer = piece_writer(http.scope)
        return EventStream(
            _events(service, call, writer, http.state.fields), seconds=patience, headers=headers
        )
    return await _whole(service, call, http, headers)


async def _submitted(service: Service, kind: Kind, http: HttpRequest, tenant: Tenant) -> Call:
    """Read a call and queue its requests. Of its body nothing is kept."""
    arrived = time.monotonic()
    check_media_type(http, "application/json")
    async with service.bodies.read(http, tenant.name) as raw:
        asked = await service.parsed(raw, lambda data: read_body(kind, read_noted(http, data)))
        call = await _read_call(service, asked, tenant, arrived)
        del asked, raw
    await _prepare(service, call)
    call.submit(service.client)
    return call


async def _read_call(service: Service, asked: Asked, tenant: Tenant, arrived: float) -> Call:
    service.check_model(asked.model)
    service.client.supervisor.check_up()
    tokenizer = service.bounded_tokenizer
    if tokenizer is not None and asked.tools is not None:
        form, token_of = tokenizer.tool_form, tokenizer.control_token
        asked = await service.in_thread(asked.held, form, token_of, check_schema)
    return await _call(service, asked, tenant, arrived)


async def _call(service: Service, asked: Asked, tenant: Tenant, arrived: float) -> Call:
    """The call of a body: tokenised and checked, in a thread where that takes time."""
    name = ID_OF[asked.kind] + secrets.token_hex(12)
    prefix = service.prefixes.find(tenant, asked.prefix) if asked.prefix is not None else None
    tasks: list[ScoreTask] = []
    if asked.kind == "score":
        requests, tasks = await service.in_thread(_score_requests, service, asked, tenant, name)
    elif _is_quick(asked):
        requests = _requests(service, asked, tenant, prefix, name)
    else:
        requests = await service.in_thread(_requests, service, asked, tenant, prefix, name)
    tokenizer = service.bounded_tokenizer
    begun = prefix or service.prefixes.begun_by(tenant, requests[0].prompt_token_ids)
    return Call(
        id=name,
        kind=asked.kind,
        model=asked.model or service.settings.names[0],
        tenant=tenant,
        requests=requests,
        tasks=tasks,
        app=begun.name if begun is not None else "",
        stream=asked.stream,
        include_usage=asked.include_usage,
        return_token_ids=asked.return_token_ids or service.tokenizer is None,
        echo=asked.echo,
        tools=tokenizer.tool_form if asked.tools is not None and tokenizer is not None else None,
        chunk_size=service.client.requests.chunk_size,
        arrived=arrived,
        seconds=asked.timeout or service.settings.timeout,
    )


async def _prepare(service: Service, call: Call) -> None:
    """Have the engine prepare what a call needs beside its prompts' tokens."""
    first = call.requests[0]
    if first.params.response_format is not None or first.pml is not None:
        await _validate(service, first, call.tenant, call.arrived, call.seconds)
    if first.pml is not None and service.settings.engine.module_disk is not None:
        wanted = service.schemas.alternatives(call.tenant, first.pml)
        service.client.prefetch(wanted, first.module_salt)


async def _validate(
    service: Service, request: Request, tenant: Tenant, arrived: float, seconds: float
) -> None:
    """Have the engine validate a request and compile its grammar, within the request's time."""
    left = max(0.0, arrived + seconds - time.monotonic())
    try:
        await service.client.ask(
            "validate",
            request,
            seconds=min(left, ANSWER_SECONDS),
            key=tenant.name,
            weight=tenant.weight,
        )
    except NoAnswerError as error:
        if error.seconds >= left:
            raise too_late(seconds) from None
        raise


def _is_quick(asked: Asked) -> bool:
    """Whether there is nothing to tokenise and little to check: a thread would take longer."""
    sizes = [
        len(prompt.token_ids) if prompt.token_ids else QUICK_TOKENS for prompt in asked.prompts
    ]
    return asked.params.choices is None and sum(sizes) < QUICK_TOKENS


def _requests(
    service: Service, asked: Asked, tenant: Tenant, prefix: Prefix | None, name: str
) -> list[Request]:
    """A validated request for each prompt."""
    if asked.prompts[0].pml is not None:
        return [_pml_request(service, asked, tenant, asked.prompts[0], name)]
    requests = []
    for number, ids in enumerate(_token_ids(service.bounded_tokenizer, asked, prefix)):
        common = service.prefixes.begun_by(tenant, ids, owner=APP_OWNER)
        request = Request(
            request_id=f"{name}-{number}",
            # One block of memory, which goes to the engine's process and is kept there as it is.
            prompt_token_ids=array("i", ids),
            prompt=_echo_of(service, asked.prompts[number], ids) if asked.echo else None,
            params=asked.params,
            stream=asked.stream,
            cache_salt=tenant.salt(asked.cache_salt),
            common_prefix_tokens=common.length(ids) if common is not None else 0,
            prefilled_tokens=_prefilled(service.bounded_tokenizer, asked.prompts[number]),
        )
        service.check(request)
        requests.append(request)
    if len(requests) > 1 and not asked.stream:
        service.check_together(requests)
    return requests


def _tasks(service: Service, asked: Asked) -> list[ScoreTask]:
    """Tokenise each prompt, and again with each of its completions."""
    some = asked.completions or [()] * len(asked.prompts)
    characters = sum(
        len(prompt.raw.text) * (1 + len(completions))
        for prompt, completions in zip(asked.prompts, some, strict=True)
        if prompt.raw is not None
    )
    if characters > MOST_CHARACTERS:
        raise RequestError(
            f"prompts have {characters} characters, each counted again for each completion, limit "
            f"is {MOST_CHARACTERS}: send several requests, or token ids"
        )
    return [asked.task(number, service.bounded_tokenizer) for number in range(len(asked.prompts))]


def _score_requests(
    service: Service, asked: Asked, tenant: Tenant, name: str
) -> tuple[list[Request], list[ScoreTask]]:
    """A validated request for each prompt, and what is scored of it."""
    requests = []
    tasks = _tasks(service, asked)
    for number, task in enumerate(tasks):
        ids = array("i", task.prompt)
        common = service.prefixes.begun_by(tenant, ids, owner=APP_OWNER)
        request = Request(
            request_id=f"{name}-{number}",
            prompt_token_ids=ids,
            params=asked.params,
            paths=task.paths,
            cache_salt=tenant.salt(asked.cache_salt),
            common_prefix_tokens=common.length(ids) if common is not None else 0,
        )
        service.check(request)
        requests.append(request)
    return requests, tasks


def _prefilled(tokenizer: BoundedTokenizer | None, prompt: Prompt) -> int:
    """Number of prefilled tokens (`Request.prefilled_tokens`) of a chat that begins an answer."""
    if tokenizer is None or prompt.messages is None or not prompt.template.add_generation_prompt:
        return 0
    return tokenizer.prefilled_tokens(prompt.template.fields)


def _echo_of(service: Service, prompt: Prompt, ids: Sequence[int]) -> str:
    """A prompt's text, to give back."""
    if prompt.raw is not None:
        return prompt.raw.text
    return "" if service.tokenizer is None else service.tokenizer.decode(ids)


def _pml_request(
    service: Service, asked: Asked, tenant: Tenant, prompt: Prompt, name: str
) -> Request:
    assert prompt.pml is not None
    compiled = service.schemas.compile(tenant, prompt.pml, prompt.isolation)
    request = Request(
        request_id=f"{name}-0",
        prompt_token_ids=compiled.ordered_token_ids.tolist(),
        params=asked.params,
        stream=asked.stream,
        cache_salt=tenant.salt(asked.cache_salt),
        common_modules=service.schemas.find(tenant, compiled.schema).is_common,
        pml=compiled,
    )
    service.check(request)
    return request


def _token_ids(
    tokenizer: BoundedTokenizer | None, asked: Asked, prefix: Prefix | None
) -> Iterator[list[int]]:
    """The ids of each prompt, made on demand: after a refused prompt no other is tokenised."""
    if asked.kind == "chat":
        if tokenizer is None:
            raise RequestError(NO_TOKENIZER)
        return (_chat_ids(tokenizer, prompt, prefix) for prompt in asked.prompts)
    return (_completion_ids(tokenizer, prompt, prefix) for prompt in asked.prompts)


def _chat_ids(tokenizer: BoundedTokenizer, prompt: Prompt, prefix: Prefix | None) -> list[int]:
    assert prompt.messages is not None
    if prefix is None:
        return tokenizer.apply_chat_template(prompt.messages, **asdict(prompt.template))
    if "chat" not in prefix.forms:
        raise RequestError(
            f"prefix {prefix.name!r} is of token ids, which stand before a prompt: "
            "use /v1/completions, or make a prefix of text or messages"
        )
    messages = [*messages_of(prefix.source), *prompt.messages]
    return tokenizer.apply_chat_template(messages, **asdict(prompt.template))


def _completion_ids(
    tokenizer: BoundedTokenizer | None, prompt: Prompt, prefix: Prefix | None
) -> list[int]:
    if prefix is not None and "completion" not in prefix.forms:
        raise RequestError(
            f"prefix {prefix.name!r} is of messages, which stand before a chat's: "
            "use /v1/chat/completions, or make a prefix of text or token ids"
        )
    if prompt.token_ids is not None:
        ids = prompt.token_ids
    elif tokenizer is None:
        raise RequestError(NO_TOKENIZER)
    else:
        assert prompt.raw is not None
        ids = tokenizer.encode_batch([prompt.raw], add_special_tokens=prefix is None)[0]
    return ids if prefix is None else [*prefix.forms["completion"], *ids]


def _form(service: Service, call: Call) -> ResponseFormat:
    params, tokenizer = call.requests[0].params, service.tokenizer
    return ResponseFormat(
        kind=call.kind,
        model=call.model,
        logprobs=params.logprobs,
        return_token_ids=call.return_token_ids,
        token_bytes=None if tokenizer is None else tokenizer.token_bytes,
        first_token_bytes=None if tokenizer is None else tokenizer.first_token_bytes,
        tools=call.tools,
        special_ids=frozenset() if tokenizer is None else tokenizer.special_ids,
        skips_special=params.skip_special_tokens,
    )


async def _whole(
    service: Service, call: Call, http: HttpRequest, headers: dict[str, str]
) -> Response:
    """The answer as one body; if the client goes away, nothing runs on for it."""
    body = asyncio.create_task(_body(service, call, headers))
    gone = asyncio.create_task(disconnected(http.receive))
    try:
        await asyncio.wait({body, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not body.done():
            return Response(status_code=CLIENT_GONE)
        return body.result()
    finally:
        for task in (body, gone):
            task.cancel()
        await asyncio.gather(body, gone, return_exceptions=True)
        del body, gone, task  # an error of the body has this frame, and must not be in it


async def _body(service: Service, call: Call, headers: dict[str, str]) -> Response:
    try:
        async with call.running(service.client) as inbox:
            pieces = await inbox.whole()
            for piece in pieces.values():
                check_piece(piece, call)
        form, logprobs = _form(service, call), call.requests[0].params.logprobs
        tokens = sum(len(piece.token_ids) for piece in pieces.values())
        if tokens * (1 + (logprobs or 0)) <= QUICK_TOKENS:
            return _written(call, pieces, form, headers)
        return await asyncio.to_thread(_written, call, pieces, form, headers)
    finally:
        service.note(call)


def _written(
    call: Call,
    pieces: dict[tuple[int, int], CompletionOutput],
    form: ResponseFormat,
    headers: dict[str, str],
) -> Response:
    return JSONResponse(whole_body(call, pieces, form), headers=headers)


async def _events(
    service: Service, call: Call, writer: PieceWriter | None, fields: Collection[str]
) -> AsyncGenerator[bytes, None]:
    """The events of a stream. What goes wrong after its head was sent is an event too.

    Args:
        writer: takes events past this generator while it waits for news; None: there is none.
        fields: of the body.
    """
    chunks = Chunks(
        call.id,
        call.created,
        _form(service, call),
        prompts=[request.prompt_token_ids for request in call.requests],
        n=call.requests[0].params.n,
        include_usage=call.include_usage,
    )
    direct = _direct(call, chunks, writer)
    last = b""
    try:
        async with call.running(service.client) as inbox:
            while not inbox.drained:
                if last:
                    yield last
                    inbox.direct = direct
                await inbox.wait()
                last = events(call, inbox.take(), chunks)
        if call.include_usage:
            last += chunks.usage(usage_of(call))
    except (*ENDS, asyncio.CancelledError):
        raise
    except BaseException as failure:
        if isinstance(failure, ApiError):
            error, last = failure, _unsent(chunks, call)
        else:
            error, last = _bug(call, failure), b""
        service.metrics.note_error(error.status)
        error.param = field_of(error.param, fields)
        last += event(error.body())
        del error  # which has this frame
    finally:
        call.inbox.direct = None  # calls outlive their connections for a while
        service.note(call)
    # In one write: each is a system call, and every request has this end.
    yield last + DONE


def _bug(call: Call, failure: BaseException) -> ApiError:
    log.exception("internal_error", failure, id=call.id)
    return ApiError(500, BUG)


def _direct(
    call: Call, chunks: Chunks, writer: PieceWriter | None
) -> Callable[[int, str], bool] | None:
    """A function that writes a token's event at once; None where events need more."""
    if (
        writer is None
        or call.tools is not None
        or len(call.requests) * call.requests[0].params.n > 1
    ):
        return None

    def write(token_id: int, text: str) -> bool:
        if not writer.is_free:
            return False
        if data := chunks.token(token_id, text):
            writer.write_piece(data)
        return True

    return write


def _unsent(chunks: Chunks, call: Call) -> bytes:
    """Events of tokens that waited for a chunk's others when the stream was cut short."""
    with contextlib.suppress(ApiError):  # another error is reported already
        return events(call, call.inbox.take(), chunks)
    return b""


# ----------------------------------------------------------------------------- answers
# A call's answer, whole or as chunks, or the error in its place.


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
    whole = {"id": call.id, "created": call.created, "usage": usage_of(call)}
    if call.tasks:
        answered = zip(call.tasks, (delta.scores for delta in call.deltas), strict=True)
        return _spelled(lambda: scores_body(call.id, call.model, answered)) | whole
    bodies = []
    for part, request in enumerate(call.requests):
        outputs = [piece for (of, _), piece in pieces.items() if of == part]
        prompt_logprobs, own = call.inbox.ended[part].prompt_logprobs, form
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
    return body | whole


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


# ----------------------------------------------------------------------------- tokens
# /tokenize and /detokenize, as vLLM has them.


def tokenize(service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    asked = check(TokenizeBody, without_nulls(body))
    service.check_model(asked.model)
    facts = service.client.facts
    assert facts is not None
    if service.tokenizer is None:
        raise RequestError(NO_TOKENIZER)
    tokenizer = BoundedTokenizer(service.tokenizer, TOKENIZED_LENGTHS * facts.max_model_len)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("body has not exactly one of prompt and messages")
    if asked.prompt is None and asked.parse_special:
        raise RequestError("parse_special and messages: messages are characters, leave it out")
    if asked.prompt is not None:
        special = asked.add_special_tokens is not False
        raw = RawText.of(asked.prompt, asked.parse_special is not False)
        ids = tokenizer.encode_batch([raw], add_special_tokens=special)[0]
    else:
        prompt = read_conversation(asked)
        assert prompt.messages is not None
        ids = tokenizer.apply_chat_template(prompt.messages, **asdict(prompt.template))
    made = {"count": len(ids), "max_model_len": facts.max_model_len, "tokens": ids}
    if asked.return_token_strs:
        made["token_strs"] = [
            tokenizer.token_bytes(token).decode(errors="replace") for token in ids
        ]
    return made


def detokenize(service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
    """The text of token ids, control tokens by their names."""
    asked = check(DetokenizeBody, without_nulls(body))
    service.check_model(asked.model)
    tokenizer, facts = service.tokenizer, service.client.facts
    if tokenizer is None:
        raise RequestError(NO_TOKENIZER)
    assert facts is not None
    unknown = [token for token in asked.tokens if token >= facts.vocab_size]
    if unknown:
        raise RequestError(
            f"tokens has token id {unknown[0]}, expected ids from 0 to {facts.vocab_size - 1}"
        )
    return {"prompt": tokenizer.decode(asked.tokens, skip_special_tokens=False)}

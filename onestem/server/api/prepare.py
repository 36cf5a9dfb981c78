"""A body becomes a call: read, tokenised, checked, and its grammar compiled."""

from __future__ import annotations

import itertools
import secrets
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest

from onestem.batch.first_pass import NO_TOKENIZER
from onestem.engine.grammar.held import held_schema
from onestem.engine.text.bounded import BoundedTokenizer
from onestem.engine.text.limits import MOST_CHARACTERS
from onestem.engine.text.tokenizer import ChatIds, Tokenizer
from onestem.errors import RequestError
from onestem.openai.forms import Reading
from onestem.openai.rank import Ranking
from onestem.openai.read import Asked, JsonObject, Prompt, read_object
from onestem.openai.schema import Kind
from onestem.rawtext import RawText
from onestem.request import Request
from onestem.scores import ScoreTask
from onestem.server.api.callers import Asks, Serves, bodies_of
from onestem.server.api.calls import Call
from onestem.server.api.limits import check_media_type
from onestem.server.errors import NoAnswerError, too_late
from onestem.server.link.client import ANSWER_SECONDS, EngineClient
from onestem.server.objects.prefixes import Prefix, messages_of
from onestem.server.objects.tenants import APP_OWNER, Tenant
from onestem.server.served_model import ServedModel
from onestem.server.service import Service

# Token ids that are checked, or written with their alternatives, on the event loop; checks take
# less than a millisecond.
QUICK_TOKENS = 8192
ID_OF: Mapping[Kind, str] = {"chat": "chatcmpl-", "completion": "cmpl-", "score": "score-"}


async def read_json(http: HttpRequest, service: Serves, tenant: Asks) -> JsonObject:
    """A body's JSON object, for routes that depend on it.

    Raises:
        ApiError: it is not JSON, too long, too slow, or has no room.
    """
    check_media_type(http, "application/json")
    async with bodies_of(http).read(http, tenant.name) as raw:
        return await service.model.parsed(raw, partial(_noted, http))


def _noted(http: HttpRequest, data: bytes) -> JsonObject:
    """A body's JSON object. Its fields are noted: errors name no others."""
    body = read_object(data)
    http.state.fields = frozenset(body)
    return body


async def prepare(
    service: Service, read: Callable[[JsonObject], Asked], http: HttpRequest, tenant: Tenant
) -> Call:
    """The call that a request asks for, ready to be submitted. Of its body nothing is kept.

    Args:
        read: a body, as its API has it; raises `RequestError` for a bad one.

    Raises:
        RequestError, ApiError: it cannot be answered, or not now.
    """
    arrived = time.monotonic()
    check_media_type(http, "application/json")
    model = service.model
    async with bodies_of(http).read(http, tenant.name) as raw:
        asked = await model.parsed(raw, lambda data: read(_noted(http, data)))
        model.check_name(asked.model)
        service.client.supervisor.check_up()
        name, prefixes = asked.prefix, service.prefixes
        prefix = prefixes.find(tenant, name) if name is not None else None
        ids: ChatIds | None = None
        if model.bounded_tokenizer is not None and asked.has_messages:
            asked, ids = await _held(model, model.bounded_tokenizer, asked, prefix)
        call = await _call(service, asked, tenant, prefix, ids, arrived)
        del asked, ids, raw
    first = call.requests[0]
    if first.params.response_format is not None or first.pml is not None:
        await _validate(service.client, call)
    if first.pml is not None and first.documents is None:
        service.schemas.prefetch(tenant, first.pml, first.module_salt)
    return call


async def _held(
    model: ServedModel, tokenizer: BoundedTokenizer, asked: Asked, prefix: Prefix | None
) -> tuple[Asked, ChatIds | None]:
    """A chat in the model's form, in a thread where it has tools; and its ids, where it had to be
    tokenised for that."""
    ids = partial(_chat_ids, tokenizer, asked.prompts[0], prefix)
    held = partial(tokenizer.held, asked, held_schema, ids)
    return held() if asked.tools is None else await model.in_thread(held)


async def _call(
    service: Service,
    asked: Asked,
    tenant: Tenant,
    prefix: Prefix | None,
    ids: ChatIds | None,
    arrived: float,
) -> Call:
    """The call of a body: tokenised and checked, in a thread where that takes time. `ids`: of its
    only prompt, if it is tokenised."""
    prefix_of_id = ID_OF[asked.kind] if asked.dialect is None else asked.dialect.id_prefix
    name = prefix_of_id + secrets.token_hex(12)
    prefixes, model = service.prefixes, service.model
    tasks: list[ScoreTask] = []
    if asked.kind == "score":
        requests, tasks = await model.in_thread(_score_requests, service, asked, tenant, name)
    elif _is_quick(asked):
        requests = _requests(service, asked, tenant, prefix, ids, name)
    else:
        requests = await model.in_thread(_requests, service, asked, tenant, prefix, ids, name)
    tokenizer = model.bounded_tokenizer
    begun = prefix or prefixes.begun_by(tenant, requests[0].prompt_token_ids)
    return Call(
        id=name,
        kind=asked.kind,
        model=asked.model or model.names[0],
        tenant=tenant,
        requests=requests,
        tasks=tasks,
        ranking=asked.ranking,
        app=begun.name if begun is not None else "",
        stream=asked.stream,
        include_usage=asked.include_usage,
        return_token_ids=asked.return_token_ids or model.tokenizer is None,
        echo=asked.echo,
        reading=_reading(tokenizer, asked, requests[0].prompt_token_ids),
        dialect=asked.dialect,
        is_kept=model.facts.options.share != "off",
        chunk_size=service.client.requests.chunk_size,
        arrived=arrived,
        seconds=asked.timeout or service.settings.timeout,
    )


async def _validate(client: EngineClient, call: Call) -> None:
    """Have the engine validate a call and compile its grammar, within the call's time."""
    left = max(0.0, call.deadline - time.monotonic())
    try:
        await client.ask(
            "validate",
            call.requests[0],
            seconds=min(left, ANSWER_SECONDS),
            key=call.tenant.name,
            weight=call.tenant.weight,
        )
    except NoAnswerError as error:
        if error.seconds >= left:
            raise too_late(call.seconds) from None
        raise


def _is_quick(asked: Asked) -> bool:
    """Whether there is nothing to tokenise and little to check: a thread would take longer."""
    sizes = [
        len(prompt.token_ids) if prompt.token_ids else QUICK_TOKENS for prompt in asked.prompts
    ]
    return asked.params.choices is None and sum(sizes) < QUICK_TOKENS


def _requests(
    service: Service,
    asked: Asked,
    tenant: Tenant,
    prefix: Prefix | None,
    ids: ChatIds | None,
    name: str,
) -> list[Request]:
    """A validated request for each prompt; `ids` as for `_call`."""
    if asked.prompts[0].pml is not None:
        return [_pml_request(service, asked, tenant, asked.prompts[0], name)]
    model, tokenizer = service.model, service.model.bounded_tokenizer
    each = _token_ids(tokenizer, asked, prefix) if ids is None else [ids]
    requests = [
        _request(
            service,
            asked,
            tenant,
            f"{name}-{number}",
            own.ids,
            documents=own.documents,
            prompt=_echo_of(model.tokenizer, asked.prompts[number], own.ids)
            if asked.echo
            else None,
            stream=asked.stream,
            **({} if tokenizer is None else tokenizer.around(asked.prompts[number], own.ids)),
        )
        for number, own in enumerate(each)
    ]
    if len(requests) > 1 and not asked.stream:
        model.check_together(requests)
    return requests


def _request(
    service: Service, asked: Asked, tenant: Tenant, name: str, ids: Sequence[int], **more: Any
) -> Request:
    """A validated request; `more`: fields that calls do not have alike."""
    common = service.prefixes.begun_by(tenant, ids, owner=APP_OWNER)
    request = Request(
        request_id=name,
        # One block of memory, which goes to the engine's process and is kept there as it is.
        prompt_token_ids=array("i", ids),
        params=asked.params,
        cache_salt=tenant.salt(asked.cache_salt),
        in_conversation=asked.in_conversation,
        common_prefix_tokens=common.length(ids) if common is not None else 0,
        **more,
    )
    service.model.check(request)
    return request


def _score_requests(
    service: Service, asked: Asked, tenant: Tenant, name: str
) -> tuple[list[Request], list[ScoreTask]]:
    """A validated request for each prompt, and what is scored of it."""
    tasks = _tasks(service.model.bounded_tokenizer, asked)
    requests = []
    for number, task in enumerate(tasks):
        with _named(asked, number):
            requests.append(
                _request(service, asked, tenant, f"{name}-{number}", task.prompt, paths=task.paths)
            )
    return requests, tasks


@contextmanager
def _named(asked: Asked, number: int) -> Iterator[None]:
    """Errors of a document say which one it is."""
    try:
        yield
    except RequestError as error:
        if asked.ranking is None:
            raise
        raise RequestError(f"documents[{number}]: {error}") from error


def _tasks(tokenizer: BoundedTokenizer | None, asked: Asked) -> list[ScoreTask]:
    """Tokenise each prompt, and again with each of its completions."""
    if asked.ranking is not None:
        return _judged(tokenizer, asked, asked.ranking)
    some = asked.completions or [()] * len(asked.prompts)
    characters = sum(
        len(prompt.raw.text) * (1 + len(completions))
        for prompt, completions in zip(asked.prompts, some, strict=True)
        if prompt.raw is not None
    )
    _bound(characters, "completion", "several requests, or token ids")
    return [asked.task(number, tokenizer) for number in range(len(asked.prompts))]


def _bound(characters: int, of: str, fewer: str) -> None:
    if characters > MOST_CHARACTERS:
        raise RequestError(
            f"prompts have {characters} characters, each counted again for each {of}, limit is "
            f"{MOST_CHARACTERS}: send {fewer}"
        )


def _judged(tokenizer: BoundedTokenizer | None, asked: Asked, ranking: Ranking) -> list[ScoreTask]:
    """The prompt of each document, and both answers to it."""
    if tokenizer is None:
        raise RequestError(NO_TOKENIZER)
    _bound(sum(map(len, itertools.chain(*ranking.pairs))), "document", "several requests")
    answers = tokenizer.encode_batch([*map(RawText, ranking.answers)], add_special_tokens=False)
    tasks = []
    for number, prompt in enumerate(asked.prompts):
        with _named(asked, number):
            tasks.append(ScoreTask(_chat_ids(tokenizer, prompt, None).ids, answers))
    return tasks


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
    service.model.check(request)
    return request


def _reading(
    tokenizer: BoundedTokenizer | None, asked: Asked, prompt: Sequence[int]
) -> Reading | None:
    """How the answers to a body are read."""
    if tokenizer is None or not asked.has_messages:
        return None
    texts = None if asked.tools is None else asked.tools.texts
    return tokenizer.reading(prompt, texts, is_free=asked.is_free)


def _echo_of(tokenizer: Tokenizer | None, prompt: Prompt, ids: Sequence[int]) -> str:
    """A prompt's text, to give back."""
    if prompt.raw is not None:
        return prompt.raw.text
    return "" if tokenizer is None else tokenizer.decode(ids)


def _token_ids(
    tokenizer: BoundedTokenizer | None, asked: Asked, prefix: Prefix | None
) -> Iterator[ChatIds]:
    """The ids of each prompt, made on demand: after a refused prompt no other is tokenised."""
    if asked.kind == "chat":
        if tokenizer is None:
            raise RequestError(NO_TOKENIZER)
        return (_chat_ids(tokenizer, prompt, prefix) for prompt in asked.prompts)
    return (ChatIds(_completion_ids(tokenizer, prompt, prefix), None) for prompt in asked.prompts)


def _chat_ids(tokenizer: BoundedTokenizer, prompt: Prompt, prefix: Prefix | None) -> ChatIds:
    assert prompt.messages is not None
    if prefix is None:
        return tokenizer.chat(prompt.messages, **asdict(prompt.template))
    if "chat" not in prefix.forms:
        raise RequestError(
            f"prefix {prefix.name!r} is of token ids, which stand before a prompt: "
            "use /v1/completions, or make a prefix of text or messages"
        )
    messages = [*messages_of(prefix.source), *prompt.messages]
    return tokenizer.chat(messages, **asdict(prompt.template))


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

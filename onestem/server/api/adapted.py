"""Routes of other APIs than OpenAI's chats, which are answered as chats."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from onestem.adapters.messages_read import CountBody, MessagesBody, read_count, read_messages
from onestem.adapters.responses_read import ResponsesBody, read_responses
from onestem.server.api.callers import Asks, Serves
from onestem.server.api.openapi import ERRORS, MESSAGE_ERRORS, body_of
from onestem.server.api.routes import COMPLETIONS, Body, answer, known_query
from onestem.server.api.tokens import counting
from onestem.server.served_model import ServedModel

Json = dict[str, Any]

adapted = APIRouter(prefix="/v1", responses=ERRORS, dependencies=[Depends(known_query)])


@adapted.post(
    "/messages", openapi_extra=body_of(MessagesBody), responses=COMPLETIONS | MESSAGE_ERRORS
)
async def messages(
    request: Request, service: Serves, tenant: Asks, beta: str | None = None
) -> Response:
    """Answer a conversation, in the form of Anthropic's API. `beta` changes nothing."""
    return await answer(read_messages, request, service, tenant)


@adapted.post("/messages/count_tokens", openapi_extra=body_of(CountBody), responses=MESSAGE_ERRORS)
async def count_tokens(body: Body, service: Serves, beta: str | None = None) -> Json:
    """How many tokens a conversation has. `beta` changes nothing."""
    service.client.supervisor.check_up()
    return await service.model.in_thread(_counted, service.model, body)


def _counted(model: ServedModel, body: Json) -> Json:
    prompt, name = read_count(body)
    model.check_name(name)
    assert prompt.messages is not None
    ids = counting(model).chat(prompt.messages, **asdict(prompt.template)).ids
    return {"input_tokens": len(ids)}


@adapted.post("/responses", openapi_extra=body_of(ResponsesBody), responses=COMPLETIONS)
async def responses(request: Request, service: Serves, tenant: Asks) -> Response:
    """Answer a conversation, in the form of OpenAI's Responses API."""
    stored = service.responses
    read = partial(
        read_responses,
        recall=partial(stored.turn, tenant.name),
        keep=partial(stored.add, tenant.name),
    )
    return await answer(read, request, service, tenant)


@adapted.get("/responses/{response_id}")
async def get_response(response_id: str, service: Serves, tenant: Asks) -> Json:
    """A stored answer."""
    return service.responses.find(tenant.name, response_id)


@adapted.delete("/responses/{response_id}")
async def delete_response(response_id: str, service: Serves, tenant: Asks) -> Json:
    """Delete a stored answer."""
    service.responses.delete(tenant.name, response_id)
    return {"id": response_id, "object": "response", "deleted": True}

"""The application: routes, and what answers where they fail."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import Callable
from functools import cache, partial

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onestem.adapters.messages_write import error_body
from onestem.batch.workplace import is_full
from onestem.beside_vllm import ROUTES, way_out
from onestem.errors import OnestemError
from onestem.options import parse_memory
from onestem.server.api.adapted import adapted
from onestem.server.api.bodies import Bodies
from onestem.server.api.callers import service_of
from onestem.server.api.control import control_routes
from onestem.server.api.foreign import ForeignCalls, hosts_of
from onestem.server.api.openapi import document
from onestem.server.api.routes import api, known_query, open_routes, tokens
from onestem.server.errors import BUG, ApiError, EngineDownError, as_api_error, field_of
from onestem.server.logs import log
from onestem.server.service import Service

MESSAGES = "/v1/messages"  # whose errors have Anthropic's form


class Contained:
    """Middleware that answers where a call fails by what no handler knows, be it a panic of a Rust
    library, which is no `Exception`. (Handlers of `Exception` see no panics, and after them the
    connection is closed.) Cancellations, by which a server that stops ends calls, pass after their
    answer, and what ends the process passes.

    Args:
        answer: makes the answer.
    """

    def __init__(self, app: ASGIApp, answer: Callable[[Request, BaseException], Response]) -> None:
        self._app, self._answer = app, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            if has_begun or scope["type"] != "http":
                raise
            await self._answer(Request(scope, receive), error)(scope, receive, send)
            if isinstance(error, asyncio.CancelledError):
                raise


def make_app(service: Service) -> FastAPI:
    """The application of a service, which must have started before requests come."""
    settings = service.settings
    app = FastAPI(title="Onestem", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    app.state.bodies = Bodies(parse_memory(settings.max_body), parse_memory(settings.max_bodies))
    app.add_middleware(
        ForeignCalls,
        hosts=hosts_of(settings.host, settings.allowed_hosts),
        refuse=_errored,
    )
    app.add_middleware(Contained, answer=_on_bug)
    app.include_router(api)
    app.include_router(adapted)
    app.include_router(tokens)
    app.include_router(open_routes)
    app.include_router(control_routes, dependencies=[Depends(known_query)])
    made = cache(partial(document, app, keys=service.keys.needed))
    app.openapi = made  # type: ignore[method-assign]
    for kind in (ApiError, OnestemError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _on_error)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, OnestemError):
        error = as_api_error(error)
    elif isinstance(error, HTTPException):
        place = f"{request.method} {request.url.path}"
        messages = {
            404: f"there is no {place}{way_out(place, ROUTES)}",
            405: f"{place} is not allowed",
        }
        message = messages.get(error.status_code, str(error.detail))
        error = ApiError(error.status_code, message, headers=error.headers)
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        name = str(next(part for part in reversed(first["loc"]) if isinstance(part, str)))
        error = ApiError(400, f"{name}: {first['msg']}", param=name)
    assert isinstance(error, ApiError)
    return _errored(request, error)


def _on_bug(request: Request, error: BaseException) -> Response:
    if isinstance(error, asyncio.CancelledError):
        return _errored(request, EngineDownError("the server is stopping: try again later"))
    log.exception("internal_error", error, method=request.method, path=request.url.path)
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and is_full(error)):
        return _errored(request, ApiError(507, "the server's disk is full: try again later"))
    return _errored(request, ApiError(500, BUG))


def _errored(request: Request, error: ApiError) -> Response:
    fields = getattr(request.state, "fields", None)
    if fields is not None:
        error.param = field_of(error.param, fields)
    service_of(request).records.metrics.note_error(error.status)
    name = f"req-{secrets.token_hex(12)}"
    log.info(
        "refused",
        id=name,
        method=request.method,
        path=request.url.path,
        status=error.status,
        code=error.code,
        param=error.param,
    )
    headers = {**error.headers, "x-request-id": name}
    if request.url.path.startswith(MESSAGES):
        body = error_body(error.status, error.message, name)
        return JSONResponse(body, error.status, {**headers, "request-id": name})
    return JSONResponse(error.body(), error.status, headers)

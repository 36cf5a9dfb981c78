"""Routes: each reads a request, calls one function, and answers."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from onestem import __version__
from onestem.batch.workplace import is_full
from onestem.beside_vllm import ROUTES, way_out
from onestem.checked import show
from onestem.errors import OnestemError
from onestem.openai.schema import (
    BatchBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    PrefixBody,
    SchemaBody,
    ScoreBody,
    TokenizeBody,
    UploadBody,
)
from onestem.server.api.completions import answer, read_noted
from onestem.server.api.completions import detokenize as detokenize_body
from onestem.server.api.completions import tokenize as tokenize_body
from onestem.server.api.control import control_routes
from onestem.server.api.http import (
    Contained,
    Download,
    ForeignCalls,
    check_media_type,
    hosts_of,
    uploaded,
)
from onestem.server.api.openapi import ERRORS, answers, body_of, document, json_body
from onestem.server.errors import (
    BUG,
    ApiError,
    EngineDownError,
    as_api_error,
    error_response,
    field_of,
)
from onestem.server.logs import log
from onestem.server.objects import files
from onestem.server.objects.tenants import Tenant
from onestem.server.page.routes import page_routes
from onestem.server.service import Service

__all__ = ["make_app"]

Json = dict[str, Any]


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


# Coroutines, though they wait for nothing: FastAPI calls functions in a thread.
async def _the_service(request: Request) -> Service:
    return _service(request)


async def _the_tenant(request: Request) -> Tenant:
    return _service(request).keys.tenant(request.headers.get("authorization"))


Serves = Annotated[Service, Depends(_the_service)]
Asks = Annotated[Tenant, Depends(_the_tenant)]
Limit = Annotated[int, Query(ge=1, le=10000)]
UPLOAD_BYTES = 2 << 20  # memory of an upload; the rest of its file is on the disk already
COMPLETIONS = answers("application/json", "text/event-stream")
Order = Literal["asc", "desc"]


def _is_list(annotation: Any) -> bool:
    return any(get_origin(one) is list for one in (annotation, *get_args(annotation)))


async def _known_query(request: Request, tenant: Asks) -> None:
    """Refuse query parameters that the route does not read: they would be ignored."""
    route = request.scope["route"]
    known = {field.alias: field.field_info.annotation for field in route.dependant.query_params}
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            there = f"there is {', '.join(sorted(known))}" if known else "there is none"
            raise ApiError(400, f"unknown query parameter: {show(name)}, {there}", param=name)
        if count > 1 and not _is_list(known[name]):
            raise ApiError(400, f"{name} stands {count} times in the query", param=name)


api = APIRouter(prefix="/v1", responses=ERRORS, dependencies=[Depends(_known_query)])
tokens = APIRouter(responses=ERRORS, dependencies=[Depends(_known_query)])
open_routes = APIRouter(responses=ERRORS)


async def _json(request: Request, service: Service, tenant: Tenant) -> Json:
    check_media_type(request, "application/json")
    async with service.bodies.read(request, tenant.name) as raw:
        return await service.parsed(raw, partial(read_noted, request))


# ----------------------------------------------------------------------------- completions


@api.post("/chat/completions", openapi_extra=json_body(ChatBody), responses=COMPLETIONS)
async def chat_completions(request: Request, service: Serves, tenant: Asks) -> Response:
    """Answer a conversation."""
    return await answer(service, "chat", request, tenant)


@api.post("/completions", openapi_extra=json_body(CompletionBody), responses=COMPLETIONS)
async def completions(request: Request, service: Serves, tenant: Asks) -> Response:
    """Continue one prompt or several."""
    return await answer(service, "completion", request, tenant)


@api.post("/score", openapi_extra=json_body(ScoreBody))
async def score(request: Request, service: Serves, tenant: Asks) -> Response:
    """How probable given texts are: completions of prompts, or whole texts."""
    return await answer(service, "score", request, tenant)


@api.get("/models")
async def list_models(service: Serves, tenant: Asks) -> Json:
    """The served model, under each of its names."""
    return {
        "object": "list",
        "data": [_model(service, name) for name in service.settings.names],
    }


@api.get("/models/{name:path}")
async def get_model(name: str, service: Serves, tenant: Asks) -> Json:
    """The served model."""
    service.check_model(name)
    return _model(service, name)


def _model(service: Service, name: str) -> Json:
    facts = service.client.facts
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "onestem",
        "max_model_len": facts.max_model_len if facts is not None else None,
    }


# ----------------------------------------------------------------------------- prefixes, schemas


@api.get("/prefixes")
async def list_prefixes(service: Serves, tenant: Asks) -> Json:
    """The key's prefixes and the operator's."""
    await service.snapshots.get()
    visible = service.prefixes.visible(tenant)
    return {"object": "list", "data": [prefix.describe() for prefix in visible]}


@api.get("/prefixes/{name}")
async def get_prefix(name: str, service: Serves, tenant: Asks) -> Json:
    """A prefix."""
    await service.snapshots.get()
    return service.prefixes.find(tenant, name).describe()


@api.put("/prefixes/{name}", openapi_extra=json_body(PrefixBody))
async def put_prefix(name: str, request: Request, service: Serves, tenant: Asks) -> Json:
    """Make a prefix, or its next version; answered when it is computed."""
    prefix = await service.prefixes.put(tenant, name, await _json(request, service, tenant))
    return prefix.describe()


@api.delete("/prefixes/{name}")
async def delete_prefix(name: str, service: Serves, tenant: Asks) -> Json:
    """Delete a prefix."""
    await service.prefixes.delete(tenant, name)
    return {"name": name, "object": "prefix", "deleted": True}


@api.get("/schemas")
async def list_schemas(service: Serves, tenant: Asks) -> Json:
    """The key's PML schemas and the operator's."""
    visible = service.schemas.visible(tenant)
    return {"object": "list", "data": [schema.describe() for schema in visible]}


@api.get("/schemas/{name}")
async def get_schema(name: str, service: Serves, tenant: Asks) -> Json:
    """A PML schema with its markup."""
    schema = service.schemas.find(tenant, name)
    return {**schema.describe(), "pml": schema.markup}


@api.put("/schemas/{name}", openapi_extra=json_body(SchemaBody))
async def put_schema(name: str, request: Request, service: Serves, tenant: Asks) -> Json:
    """Make a PML schema, or its next version; answered when it is encoded if `encode` is true."""
    return await service.schemas.put(tenant, name, await _json(request, service, tenant))


@api.delete("/schemas/{name}")
async def delete_schema(name: str, service: Serves, tenant: Asks) -> Json:
    """Delete a PML schema."""
    await service.schemas.delete(tenant, name)
    return {"name": name, "object": "schema", "deleted": True}


# ----------------------------------------------------------------------------- files, batches


@api.post("/files", openapi_extra=body_of(UploadBody, "multipart/form-data"))
async def upload_file(request: Request, service: Serves, tenant: Asks) -> Json:
    """Store a file of batch lines."""
    settings = service.settings
    async with (
        service.bodies.room(tenant.name, UPLOAD_BYTES),
        uploaded(request, settings.max_file_bytes) as file,
    ):
        name, most = file.filename or "upload.jsonl", settings.max_key_files_bytes
        row = await files.keep(service.store, tenant, name, file.file, most)
    return files.describe(row)


@api.get("/files")
async def list_files(
    service: Serves,
    tenant: Asks,
    purpose: str | None = None,
    order: Order = "desc",
    limit: Limit = 10000,
    after: str | None = None,
) -> Json:
    """The key's files, all or of one purpose, newest first unless `order` is asc."""
    rows = await asyncio.to_thread(service.store.list_files, tenant.name)
    rows = [row for row in rows if purpose in (None, row["purpose"])]
    rows = rows if order == "desc" else rows[::-1]
    return files.page_of([files.describe(row) for row in rows], limit, after)


@api.get("/files/{file_id}")
async def get_file(file_id: str, service: Serves, tenant: Asks) -> Json:
    """A file's name and size."""
    return files.describe(await files.find_file(service.store, tenant, file_id))


@api.get("/files/{file_id}/content", responses=answers("application/octet-stream"))
async def get_content(file_id: str, service: Serves, tenant: Asks) -> Response:
    """A file's bytes."""
    row = await files.find_file(service.store, tenant, file_id)
    return Download(
        service.store.files / row["id"],
        media_type="application/octet-stream",
        filename=row["filename"],
    )


@api.delete("/files/{file_id}")
async def delete_file(file_id: str, service: Serves, tenant: Asks) -> Json:
    """Remove a file; one that a batch still reads is kept."""
    await files.find_file(service.store, tenant, file_id)
    await service.jobs.check_unused(file_id)
    await asyncio.to_thread(service.store.delete_file, tenant.name, file_id)
    return {"id": file_id, "object": "file", "deleted": True}


@api.post("/batches", openapi_extra=json_body(BatchBody))
async def create_batch(request: Request, service: Serves, tenant: Asks) -> Json:
    """Start a job on an uploaded file."""
    return await service.jobs.create(tenant, await _json(request, service, tenant))


@api.get("/batches")
async def list_batches(
    service: Serves, tenant: Asks, limit: Limit = 20, after: str | None = None
) -> Json:
    """The key's batches, newest first."""
    rows = await asyncio.to_thread(service.store.list_batches, tenant.name)
    return files.page_of(rows, limit, after)


@api.get("/batches/{batch_id}")
async def get_batch(batch_id: str, service: Serves, tenant: Asks) -> Json:
    """A batch and its progress."""
    return await service.jobs.find(tenant, batch_id)


@api.post("/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, service: Serves, tenant: Asks) -> Json:
    """End a batch; its finished answers stay."""
    return await service.jobs.cancel(tenant, batch_id)


# ----------------------------------------------------------------------------- tokens


@tokens.post("/tokenize", openapi_extra=json_body(TokenizeBody))
async def tokenize(request: Request, service: Serves, tenant: Asks) -> Json:
    """Token ids of a text or of a conversation."""
    body = await _json(request, service, tenant)
    service.client.supervisor.check_up()
    return await service.in_thread(tokenize_body, service, body)


@tokens.post("/detokenize", openapi_extra=json_body(DetokenizeBody))
async def detokenize(request: Request, service: Serves, tenant: Asks) -> Json:
    """The text of token ids."""
    body = await _json(request, service, tenant)
    service.client.supervisor.check_up()
    return await service.in_thread(detokenize_body, service, body)


# ----------------------------------------------------------------------------- health, metrics


@open_routes.get("/health")
async def health(service: Serves) -> Response:
    """200 while requests are taken, 503 while not."""
    state = "stopping" if service.stopping.is_set() else service.client.supervisor.state
    status = 200 if state == "running" else 503
    return JSONResponse({"status": "ok" if status == 200 else state}, status)


@open_routes.get("/version")
async def version() -> Json:
    """The server's version."""
    return {"version": __version__}


@open_routes.get("/metrics", responses=answers("text/plain"))
async def metrics(request: Request, service: Serves) -> Response:
    """Counts and times in Prometheus' text format."""
    service.keys.operator(request.headers.get("authorization"))
    snapshot = await service.snapshots.get()
    text = service.metrics.text(snapshot.get("pages", {}))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


# ----------------------------------------------------------------------------- the whole


def make_app(service: Service) -> FastAPI:
    """The application of a service, which must have started before requests come."""
    app = FastAPI(title="Onestem", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    app.add_middleware(
        ForeignCalls,
        hosts=hosts_of(service.settings.host, service.settings.allowed_hosts),
        refuse=_errored,
    )
    app.add_middleware(Contained, answer=_on_bug)
    app.include_router(api)
    app.include_router(tokens)
    app.include_router(open_routes)
    app.include_router(control_routes, dependencies=[Depends(_known_query)])
    app.include_router(page_routes)
    made: list[Json] = []

    def openapi() -> Json:
        if not made:
            made.append(document(app, keys=service.keys.needed))
        return made[0]

    app.openapi = openapi  # type: ignore[method-assign]
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    return app


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _errored(request, error)


async def _on_mistake(request: Request, error: Exception) -> Response:
    assert isinstance(error, OnestemError)
    return _errored(request, as_api_error(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path}"
    hint = way_out(place, ROUTES)
    messages = {404: f"there is no {place}{hint}", 405: f"{place} is not allowed"}
    message = messages.get(error.status_code, str(error.detail))
    return _errored(request, ApiError(error.status_code, message, headers=error.headers))


async def _on_bad_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(next(part for part in reversed(first["loc"]) if isinstance(part, str)))
    return _errored(request, ApiError(400, f"{name}: {first['msg']}", param=name))


def _on_bug(request: Request, error: BaseException) -> Response:
    if isinstance(error, asyncio.CancelledError):
        return _errored(request, EngineDownError("the server is stopping: try again later"))
    log.exception("internal_error", error, method=request.method, path=request.url.path)
    if isinstance(error, OSError) and is_full(error):
        return _errored(request, ApiError(507, "the server's disk is full: try again later"))
    return _errored(request, ApiError(500, BUG))


def _errored(request: Request, error: ApiError) -> Response:
    fields = getattr(request.state, "fields", None)
    if fields is not None:
        error.param = field_of(error.param, fields)
    service = _service(request)
    service.metrics.note_error(error.status)
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
    return error_response(error, name)


HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _on_api_error,
    OnestemError: _on_mistake,
    HTTPException: _on_http_error,
    RequestValidationError: _on_bad_parameter,
}

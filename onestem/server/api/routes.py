"""Routes: each reads a request, calls one function, and answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import JSONResponse, Response

from onestem import __version__
from onestem.checked import show
from onestem.openai.read import Asked, JsonObject, read_body, read_rerank
from onestem.openai.schema import (
    BatchBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    PrefixBody,
    RerankBody,
    SchemaBody,
    ScoreBody,
    TokenizeBody,
    UploadBody,
)
from onestem.options import parse_memory
from onestem.server.api.callers import Asks, Operates, Serves, bodies_of
from onestem.server.api.openapi import ERRORS, answers, body_of
from onestem.server.api.prepare import prepare, read_json
from onestem.server.api.reply import Reply
from onestem.server.api.tokens import detokenize as detokenize_body
from onestem.server.api.tokens import tokenize as tokenize_body
from onestem.server.api.transfers import Download, uploaded
from onestem.server.errors import ApiError
from onestem.server.objects import files
from onestem.server.objects.tenants import Tenant
from onestem.server.service import Service

Json = dict[str, Any]
Body = Annotated[Json, Depends(read_json)]
Limit = Annotated[int, Query(ge=1, le=10000)]
UPLOAD_BYTES = 2 << 20  # memory of an upload; the rest of its file is on the disk already
COMPLETIONS = answers("application/json", "text/event-stream")
Order = Literal["asc", "desc"]


def _is_list(annotation: Any) -> bool:
    return any(get_origin(one) is list for one in (annotation, *get_args(annotation)))


async def known_query(request: Request, tenant: Asks) -> None:
    """Refuse query parameters that the route does not read: they would be ignored."""
    route = request.scope["route"]
    known = {field.alias: field.field_info.annotation for field in route.dependant.query_params}
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            there = f"there is {', '.join(sorted(known))}" if known else "there is none"
            raise ApiError(400, f"unknown query parameter: {show(name)}, {there}", param=name)
        if count > 1 and not _is_list(known[name]):
            raise ApiError(400, f"{name} stands {count} times in the query", param=name)


api = APIRouter(prefix="/v1", responses=ERRORS, dependencies=[Depends(known_query)])
tokens = APIRouter(responses=ERRORS, dependencies=[Depends(known_query)])
open_routes = APIRouter(responses=ERRORS)


@api.post("/chat/completions", openapi_extra=body_of(ChatBody), responses=COMPLETIONS)
async def chat_completions(request: Request, service: Serves, tenant: Asks) -> Response:
    """Answer a conversation."""
    return await answer(partial(read_body, "chat"), request, service, tenant)


@api.post("/completions", openapi_extra=body_of(CompletionBody), responses=COMPLETIONS)
async def completions(request: Request, service: Serves, tenant: Asks) -> Response:
    """Continue one prompt or several."""
    return await answer(partial(read_body, "completion"), request, service, tenant)


@tokens.post("/score", include_in_schema=False)
@api.post("/score", openapi_extra=body_of(ScoreBody))
async def score(request: Request, service: Serves, tenant: Asks) -> Response:
    """How probable given texts are: completions of prompts, or whole texts; or how relevant
    documents are to queries."""
    return await answer(partial(read_body, "score"), request, service, tenant)


@tokens.post("/rerank", include_in_schema=False)
@tokens.post("/v2/rerank", include_in_schema=False)
@api.post("/rerank", openapi_extra=body_of(RerankBody))
async def rerank(request: Request, service: Serves, tenant: Asks) -> Response:
    """Order documents by how relevant they are to a query."""
    return await answer(read_rerank, request, service, tenant)


async def answer(
    read: Callable[[JsonObject], Asked], request: Request, service: Service, tenant: Tenant
) -> Response:
    """The answer to a body; `read` as for `prepare`."""
    call = await prepare(service, read, request, tenant)
    return await Reply(call, service).response(request)


@api.get("/models")
async def list_models(service: Serves, tenant: Asks) -> Json:
    """The served model, under each of its names."""
    return {
        "object": "list",
        "data": [_model(service, name) for name in service.model.names],
    }


@api.get("/models/{name:path}")
async def get_model(name: str, service: Serves, tenant: Asks) -> Json:
    """The served model."""
    service.model.check_name(name)
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


@api.put("/prefixes/{name}", openapi_extra=body_of(PrefixBody))
async def put_prefix(name: str, body: Body, service: Serves, tenant: Asks) -> Json:
    """Make a prefix, or its next version; answered when it is computed."""
    prefix = await service.prefixes.put(tenant, name, body)
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
    return {**schema.describe(), "pml": schema.source}


@api.put("/schemas/{name}", openapi_extra=body_of(SchemaBody))
async def put_schema(name: str, body: Body, service: Serves, tenant: Asks) -> Json:
    """Make a PML schema, or its next version; answered when it is encoded if `encode` is true."""
    return await service.schemas.put(tenant, name, body)


@api.delete("/schemas/{name}")
async def delete_schema(name: str, service: Serves, tenant: Asks) -> Json:
    """Delete a PML schema."""
    await service.schemas.delete(tenant, name)
    return {"name": name, "object": "schema", "deleted": True}


@api.post("/files", openapi_extra=body_of(UploadBody, "multipart/form-data"))
async def upload_file(request: Request, service: Serves, tenant: Asks) -> Json:
    """Store a file of batch lines."""
    settings = service.settings
    async with (
        bodies_of(request).room(tenant.name, UPLOAD_BYTES),
        uploaded(request, parse_memory(settings.max_file)) as file,
    ):
        name, most = file.filename or "upload.jsonl", parse_memory(settings.max_key_files)
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


@api.post("/batches", openapi_extra=body_of(BatchBody))
async def create_batch(body: Body, service: Serves, tenant: Asks) -> Json:
    """Start a job on an uploaded file."""
    return await service.jobs.create(tenant, body)


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


@tokens.post("/tokenize", openapi_extra=body_of(TokenizeBody))
async def tokenize(body: Body, service: Serves) -> Json:
    """Token ids of a text or of a conversation."""
    service.client.supervisor.check_up()
    return await service.model.in_thread(tokenize_body, service.model, body)


@tokens.post("/detokenize", openapi_extra=body_of(DetokenizeBody))
async def detokenize(body: Body, service: Serves) -> Json:
    """The text of token ids."""
    service.client.supervisor.check_up()
    return await service.model.in_thread(detokenize_body, service.model, body)


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
async def metrics(service: Operates) -> Response:
    """Counts and times in Prometheus' text format."""
    snapshot = await service.snapshots.get()
    text = service.records.metrics.text(snapshot)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

"""The page at / and what it reads: the operator's where keys are needed. The page at /docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import FileResponse, HTMLResponse, Response

from onestem.server.api_page import api_page
from onestem.server.errors import ApiError
from onestem.server.service import Service
from onestem.server.state import events, state_of
from onestem.server.streaming import EventStream

__all__ = ["page_routes"]

FOLDER = Path(__file__).parent / "page"
NAME = re.compile(r"[A-Za-z0-9_-]+\.(?:js|css|svg)")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
}
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def _operators(request: Request) -> Service:
    """The service, for the operator only."""
    service: Service = request.app.state.service
    service.keys.operator(request.headers.get("authorization"))
    return service


Operators = Annotated[Service, Depends(_operators)]
page_routes = APIRouter(include_in_schema=False)


@page_routes.get("/")
async def page(service: Operators) -> Response:
    return _file("index.html")


@page_routes.get("/page/{name}")
async def asset(name: str, service: Operators) -> Response:
    if not NAME.fullmatch(name) or not (FOLDER / name).is_file():
        raise ApiError(404, "there is no such file of the page", code="not_found")
    return _file(name)


def _file(name: str) -> Response:
    path = FOLDER / name
    if not path.is_file():
        raise ApiError(404, "this installation has no page", code="not_found")
    return FileResponse(path, media_type=TYPES[path.suffix], headers=HEADERS | POLICY)


@page_routes.get("/docs")
async def docs(request: Request) -> Response:
    """Open to all, as /openapi.json is."""
    state = request.app.state
    if not hasattr(state, "docs"):
        html, policy = api_page(request.app.openapi())
        state.docs = HTMLResponse(html, headers=HEADERS | policy)
    made: Response = state.docs
    return made


@page_routes.get("/internal/state")
async def state(service: Operators) -> dict[str, Any]:
    return await state_of(service)


@page_routes.get("/internal/events")
async def stream(service: Operators) -> Response:
    return EventStream(events(service))

"""The page, its files, and the state that it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from onestem.server.api.callers import Operates
from onestem.server.api.streams import EventStream
from onestem.server.api.transfers import Download
from onestem.server.page.reference import api_page
from onestem.server.page.state import events, state_of

FOLDER = Path(__file__).parent / "static"
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


page_routes = APIRouter(include_in_schema=False)


@page_routes.get("/")
async def page(service: Operates) -> Response:
    """The page; raises a 404 where the installation has none."""
    return _file("index.html")


@page_routes.get("/page/{name}")
async def asset(name: str, service: Operates) -> Response:
    """A file of the page."""
    if not NAME.fullmatch(name) or not (FOLDER / name).is_file():
        raise HTTPException(404, "there is no such file of the page")
    return _file(name)


def _file(name: str) -> Response:
    path = FOLDER / name
    if not path.is_file():
        raise HTTPException(404, "this installation has no page")
    return Download(path, media_type=TYPES[path.suffix], headers=HEADERS | POLICY)


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
async def state(service: Operates) -> dict[str, Any]:
    """All that the page shows, once."""
    return await state_of(service)


@page_routes.get("/internal/events")
async def stream(service: Operates) -> Response:
    """The same as events, about once a second."""
    return EventStream(events(service))

"""What pages of other sites can have a browser send, and why it is refused.

A server on the loopback address usually has no keys, and each page that its user opens can send
requests to it. Three things are refused:

* a `Host` that is not the server's: a page may point its own name to 127.0.0.1, and the browser
  takes both for one site then (DNS rebinding);
* an `Origin` of another site, where the request may change something. Answers to GET need no such
  check: no CORS header is sent, so a browser shows them to no page of another site;
* bodies that an HTML form can send, which browsers let through to any site.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from onestem.checked import show
from onestem.errors import ConfigError
from onestem.server.errors import ApiError

PATTERN = re.compile(r"\*|(\*?\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
READING = ("GET", "HEAD", "OPTIONS")

Refuse = Callable[[Request, ApiError], Response]


def hosts_of(bound: str, allowed: Sequence[str]) -> list[str]:
    """Patterns of hosts that a server answers to: `name`, `*.name` or `*`.

    Args:
        bound: the address or name that it listens on.
        allowed: what `--allowed-hosts` says, if anything.

    Raises:
        ConfigError: one of `allowed` is no host.
    """
    if allowed:
        return [_pattern(host) for host in allowed]
    address = _address(bound)
    local = address.is_loopback if address is not None else bound.lower() == "localhost"
    return [*LOOPBACK, bound.lower()] if local else ["*"]


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _pattern(host: str) -> str:
    name = host.lower().strip("[]")
    if not PATTERN.fullmatch(name) and _address(name) is None:
        raise ConfigError(
            f"allowed_hosts has {show(host)}, expected a name without port, .NAME or *"
        )
    return f"*{name}" if name.startswith(".") else name


def _name_of(netloc: str) -> str:
    """The host of `host:port`, in lower case and without brackets; "" if it is none."""
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""


class ForeignCalls:
    """Middleware that refuses calls to another host, or from a page of another site.

    Args:
        hosts: patterns of hosts that are the server's (see `hosts_of`).
        refuse: makes the answer of an error.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], refuse: Refuse) -> None:
        self._app, self._refuse = app, refuse
        self._any = "*" in hosts
        self._names = {host for host in hosts if "*" not in host}
        self._ends = tuple(host[1:] for host in hosts if host.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            request = Request(scope)
            error = self._host_error(request) or _origin_error(request)
            app = self._refuse(request, error) if error is not None else app
        await app(scope, receive, send)

    def _host_error(self, request: Request) -> ApiError | None:
        host = request.headers.get("host")
        # Browsers never leave it out.
        if host is None or self._any:
            return None
        name = _name_of(host)
        if name in self._names or name.endswith(self._ends):
            return None
        return ApiError(
            403,
            f"host {show(host)} is not allowed: start the server with --allowed-hosts to allow it",
            code="host_not_allowed",
        )


def _origin_error(request: Request) -> ApiError | None:
    origin = request.headers.get("origin")
    if origin is None or request.method in READING:
        return None
    host = request.headers.get("host", "")
    if origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}"):
        return None
    return ApiError(
        403,
        f"origin {show(origin)} is not allowed: it is another site than {show(host)}",
        code="origin_not_allowed",
    )

"""What HTTP needs: limits, refusals of other sites, streams, half open connections, uploads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, NoReturn, Protocol
from urllib.parse import urlsplit
from weakref import ref

import h11
import uvicorn
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from onestem.checked import show
from onestem.errors import ConfigError
from onestem.server.errors import ApiError, error_object

__all__ = [
    "COMMENT",
    "Contained",
    "DONE",
    "Download",
    "EventStream",
    "ForeignCalls",
    "HalfOpenProtocol",
    "PieceWriter",
    "check_media_type",
    "declared_length",
    "disconnected",
    "event",
    "hosts_of",
    "limited",
    "piece_writer",
    "read_limited",
]

BODY_SECONDS = 60.0
# Maximum bytes and seconds to go on reading a body that is refused.
DROPPED_BYTES, DROP_SECONDS = 4 << 20, 2.0


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is longer than {limit} bytes: send less, or raise the server's limit",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def declared_length(request: Request) -> int | None:
    """Bytes that a body has; None where that is not said before."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdecimal() else None


async def _check_declared(request: Request, limit: int) -> None:
    if (declared_length(request) or 0) > limit:
        await _drop_rest(request.receive)
        raise _too_large(limit)


async def _drop_rest(receive: Receive) -> None:
    """Read what is under way: if a connection is closed with unread bytes, the client may lose the
    answer."""
    left = DROPPED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROP_SECONDS):
            while left > 0:
                message = await receive()
                if not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))


async def read_limited(request: Request, limit: int) -> bytes:
    """A body of at most `limit` bytes; raises a 413 for a longer one."""
    await _check_declared(request, limit)
    parts, size, more = [], 0, True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the client went away before its body had come")
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                if size > limit:
                    await _refuse_longer(request, limit, more=more)
                parts.append(part)
    except TimeoutError as error:
        raise _too_slow("the body did not come") from error
    return b"".join(parts)


def _too_slow(what: str) -> ApiError:
    return ApiError(
        408,
        f"{what} within {BODY_SECONDS:.0f} s",
        code="body_too_slow",
        headers={"Connection": "close"},
    )


async def _refuse_longer(request: Request, limit: int, *, more: bool) -> NoReturn:
    if more:
        await _drop_rest(request.receive)
    raise _too_large(limit)


async def limited(request: Request, limit: int) -> Request:
    """The same request, whose body breaks off with a 413 beyond `limit` bytes, or with a 408 where
    nothing more of it comes."""
    await _check_declared(request, limit)
    seen = 0

    async def receive() -> Message:
        nonlocal seen
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await request.receive()
        except TimeoutError as error:
            raise _too_slow("nothing more of the body came") from error
        seen += len(message.get("body", b""))
        if seen > limit:
            await _refuse_longer(request, limit, more=message.get("more_body", False))
        return message

    return Request(request.scope, receive)


# ----------------------------------------------------------------------------- foreign
# What pages of other sites can have a browser send, and why it is refused.
#
# A server on the loopback address usually has no keys, and each page that its user opens can send
# requests to it. Three things are refused:
#
# * a `Host` that is not the server's: a page may point its own name to 127.0.0.1, and the browser
#   takes both for one site then (DNS rebinding);
# * an `Origin` of another site, where the request may change something. Answers to GET need no such
#   check: no CORS header is sent, so a browser shows them to no page of another site;
# * bodies that an HTML form can send, which browsers let through to any site.

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


def check_media_type(request: Request, expected: str) -> None:
    """Raise a 415 unless the body says that it is of this type."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != expected:
        raise ApiError(
            415,
            f"content-type is {show(given)}, expected {expected}",
            code="unsupported_media_type",
        )


# ----------------------------------------------------------------------------- streaming
# Server-sent events: framing, and a response that notices when its reader is gone.

DONE = b"data: [DONE]\n\n"
COMMENT = "comment"  # key in a request's `state`: bytes that may be written between two events
WRITER = "writer"  # key there: a `PieceWriter`


class PieceWriter(Protocol):
    """Writes pieces of a chunked body past ASGI's and h11's layers, in a third of their time:
    streams have a piece for each token."""

    @property
    def is_free(self) -> bool:
        """Whether the client is there and reads; otherwise ASGI's `send` waits for it."""
        ...

    def write_piece(self, data: bytes) -> None: ...


def piece_writer(scope: Scope) -> PieceWriter | None:
    """The writer of a call's connection; None if its answer is not chunked."""
    is_chunked = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
    return scope.get("state", {}).get(WRITER) if is_chunked else None


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event. Characters above ASCII are escaped: no reader can take one for a line end."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come, up to `DONE`. However it ends, the generator is closed: its
    `finally` frees what it holds.

    Args:
        events: whole events, one or several at a time.
        seconds: after which a reader that does not read is given up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        )
        del self.headers["content-length"]
        self._events = events
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.get("state", {})[COMMENT] = b":\n\n"
        sender = asyncio.create_task(self._send_all(send, piece_writer(scope)))
        watcher = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait(
                {sender, watcher}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (sender, watcher):
                task.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)
            await self._events.aclose()
        if sender.done() and not sender.cancelled():
            # A client that went away while we wrote to it is no error. (`result` would raise it
            # here: an error that refers to this frame, and so to itself.)
            error = sender.exception()
            if error is not None and not isinstance(error, OSError):
                raise error

    async def _send_all(self, send: Send, writer: PieceWriter | None) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._events:
            more = not chunk.endswith(DONE)
            if more and chunk and writer is not None and writer.is_free:
                writer.write_piece(chunk)
                continue
            await send({"type": "http.response.body", "body": chunk, "more_body": more})
            if not more:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Download(FileResponse):
    """A file, or the part of it that a `Range` asks for."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def checked(message: Message) -> None:
            status = message.get("status")
            if status in (400, 416):  # in plain text
                raise ApiError(
                    status,
                    f"range is {show(Headers(scope=scope).get('range'))}, expected parts of the "
                    f"file like bytes=0-99; it has {Path(self.path).stat().st_size} bytes",
                    code="bad_range",
                )
            await send(message)

        await super().__call__(scope, receive, checked)


# ----------------------------------------------------------------------------- half open
# Connections whose client has ended its sending, and may still read.
#
# `shutdown(SHUT_WR)` after a request and a client that is gone look the same: both send an end of
# file. Only a client that is gone answers a write with a reset. So something harmless is written:
# `100 Continue` before an answer, a comment into a stream.

# A reader that takes nothing of a whole answer for this long is given up: until then the answer
# is in memory. (A stream has a deadline.)
READER_SECONDS = 60.0
FIRST_PAUSE = 0.05  # seconds before the first look whether the client is there; each next is twice


class HalfOpenProtocol(H11Protocol):
    """uvicorn's protocol, but it also answers complete requests after an end of file."""

    _timer: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, WRITER: self}, _loop)

    @property
    def is_free(self) -> bool:
        cycle = self.cycle
        return cycle is not None and not self.flow.write_paused and not cycle.disconnected

    def write_piece(self, data: bytes) -> None:
        """Write a chunk as h11 would."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: while a complete request has no complete answer.

        HTTP/1.0 knows no `100 Continue`: there, a client that ends its sending counts as gone.
        """
        if self._timer is None and self._owes_answer and self.scope["http_version"] == "1.1":
            self._look_later(FIRST_PAUSE)
        return self._timer is not None

    @property
    def _owes_answer(self) -> bool:
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _look_later(self, pause: float) -> None:
        self._timer = self.loop.call_later(pause, self._look, pause)

    def _look(self, pause: float) -> None:
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._write_harmless()
            self._look_later(2 * pause)

    def _write_harmless(self) -> None:
        comment = self.cycle.scope["state"].get(COMMENT)
        event: h11.Event | None = None
        if not self.cycle.response_started:
            event = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
        elif comment is not None and not self.cycle.response_complete:
            event = h11.Data(data=comment)
        if event is not None:
            self.transport.write(self.conn.send(event) or b"")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        body = json.dumps(error_object(400, f"the request cannot be read: {msg}")).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        length = (b"content-length", str(len(body)).encode())
        head = h11.Response(status_code=400, headers=[*headers, length], reason=b"Bad Request")
        for part in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        """Nothing more can be asked after an end of file."""
        super().on_response_complete()
        self._watch_reader()
        if self._timer is not None and not self._owes_answer:
            self.transport.close()

    def _watch_reader(self) -> None:
        """Look later whether the client has taken some of what it has not read."""
        unread, cycle = self.transport.get_write_buffer_size(), self.cycle
        if unread and cycle is not None and self._reader is None:
            self._reader = self.loop.call_later(
                READER_SECONDS, self._give_up_reader, unread, ref(cycle)
            )

    def _give_up_reader(self, unread: int, cycle: ref[RequestResponseCycle]) -> None:
        """Give up a client that has taken nothing of what it had not read. Where a further answer
        was begun since, that cannot be told: look again."""
        self._reader = None
        if self.cycle is cycle() and self.transport.get_write_buffer_size() >= unread:
            self.transport.abort()
        else:
            self._watch_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, or has its answer."""
        for timer in (self._timer, self._reader):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # Both refer back here: the last call, with its body, would stay until the collector comes.
        self.cycle, self.scope, self.app_state = None, None, {}  # type: ignore[assignment]


# ----------------------------------------------------------------------------- uploads


@asynccontextmanager
async def uploaded(request: Request, limit: int) -> AsyncIterator[UploadFile]:
    """The file of a multipart body of `limit` bytes at most."""
    check_media_type(request, "multipart/form-data")
    try:
        bounded = await limited(request, limit)
        form = await bounded.form(max_files=1, max_fields=4)
    except (MultiPartException, HTTPException) as error:
        reason = error.message if isinstance(error, MultiPartException) else error.detail
        raise ApiError(400, f"the body is not a good form: {reason}") from error
    try:
        yield _file_of(form)
    finally:
        await form.close()


def _file_of(form: FormData) -> UploadFile:
    for name in form:
        if name not in ("file", "purpose"):
            raise ApiError(400, f"unknown field in body: {show(name)}", param=name)
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise ApiError(400, "body has no file", param="file")
    if purpose != "batch":
        raise ApiError(400, f"purpose is {show(purpose)}, expected 'batch'", param="purpose")
    return file

"""How long bodies may be, and how long they may take."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NoReturn

from starlette.requests import Request
from starlette.types import Message, Receive

from onestem.server.errors import ApiError

__all__ = ["limited", "read_limited"]

BODY_SECONDS = 60.0
# What is read of a body that is refused.
DROPPED_BYTES, DROP_SECONDS = 4 << 20, 2.0


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is longer than {limit} bytes: send less, or raise the server's limit",
        code="body_too_large",
        headers={"Connection": "close"},
    )


async def _check_declared(request: Request, limit: int) -> None:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and int(declared) > limit:
        await _drop_rest(request.receive)
        raise _too_large(limit)


async def _drop_rest(receive: Receive) -> None:
    """Take what is under way: where a connection is closed with bytes that nobody has read, the
    other end may lose the answer."""
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
        raise ApiError(
            408,
            f"the body did not come within {BODY_SECONDS:.0f} s",
            code="body_too_slow",
            headers={"Connection": "close"},
        ) from error
    return b"".join(parts)


async def _refuse_longer(request: Request, limit: int, *, more: bool) -> NoReturn:
    if more:
        await _drop_rest(request.receive)
    raise _too_large(limit)


async def limited(request: Request, limit: int) -> Request:
    """The same request, whose body breaks off with a 413 beyond `limit` bytes."""
    await _check_declared(request, limit)
    seen = 0

    async def receive() -> Message:
        nonlocal seen
        message = await request.receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            await _refuse_longer(request, limit, more=message.get("more_body", False))
        return message

    return Request(request.scope, receive)

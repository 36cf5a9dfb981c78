"""How long bodies may be, and how long they may take."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from onestem.server.errors import ApiError

__all__ = ["limited", "read_limited"]

BODY_SECONDS = 60.0


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is longer than {limit} bytes: send less, or raise the server's limit",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def _check_declared(request: Request, limit: int) -> None:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)


async def read_limited(request: Request, limit: int) -> bytes:
    """A body of at most `limit` bytes; raises a 413 for a longer one."""
    _check_declared(request, limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError as error:
        raise ApiError(
            408,
            f"the body did not come within {BODY_SECONDS:.0f} s",
            code="body_too_slow",
            headers={"Connection": "close"},
        ) from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client went away before its body had come") from error
    return b"".join(parts)


def limited(request: Request, limit: int) -> Request:
    """The same request, whose body breaks off with a 413 beyond `limit` bytes."""
    _check_declared(request, limit)
    seen = 0

    async def receive() -> Message:
        nonlocal seen
        message = await request.receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise _too_large(limit)
        return message

    return Request(request.scope, receive)

"""Limits of bodies: their length, their time, their type."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from onestem.checked import show
from onestem.server.errors import ApiError

BODY_SECONDS = 60.0
# To go on reading a body that is refused: maximum bytes, seconds in all, and between two pieces.
DROPPED_BYTES, DROP_SECONDS, DROP_PAUSE = 4 << 20, 20.0, 2.0


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


async def _drop_rest(receive: Receive) -> None:
    """Read what is under way: if a connection is closed with unread bytes, the client may lose the
    answer."""
    left = DROPPED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROP_SECONDS):
            while left > 0:
                async with asyncio.timeout(DROP_PAUSE):
                    message = await receive()
                if not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))


def _too_slow(what: str) -> ApiError:
    return ApiError(
        408,
        f"{what} within {BODY_SECONDS:.0f} s",
        code="body_too_slow",
        headers={"Connection": "close"},
    )


async def read_limited(request: Request, limit: int) -> bytes:
    """A body of at most `limit` bytes; raises a 413 for a longer one, a 408 for a slower one."""
    bounded = await limited(request, limit)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await bounded.body()
    except TimeoutError as error:
        raise _too_slow("the body did not come") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client went away before its body had come") from error


async def limited(request: Request, limit: int) -> Request:
    """The same request, whose body breaks off with a 413 beyond `limit` bytes, or with a 408 where
    nothing more of it comes."""
    if (declared_length(request) or 0) > limit:
        await _drop_rest(request.receive)
        raise _too_large(limit)
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
            if message.get("more_body", False):
                await _drop_rest(request.receive)
            raise _too_large(limit)
        return message

    return Request(request.scope, receive)


def check_media_type(request: Request, expected: str) -> None:
    """Raise a 415 unless the body says that it is of this type."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != expected:
        raise ApiError(
            415,
            f"content-type is {show(given)}, expected {expected}",
            code="unsupported_media_type",
        )

"""Memory of request bodies: how many large ones are read and parsed at once.

A body is refused beyond its limit, but many clients may send such bodies together. So a large one
has to have room before it is read; until then it stays where it is, at the client and in the
network's buffers. Each key has room for one body of its own, so that no key's slow uploads keep
another's bodies waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request

from onestem.server.api.limits import BODY_SECONDS, declared_length, read_limited
from onestem.server.errors import ApiError

SMALL_BYTES = 1 << 15  # not counted: a connection's own buffers take more
RETRY_SECONDS = 5


@dataclass(eq=False)
class _Waiting:
    key: str
    size: int
    came: asyncio.Future[bool]  # whether its room is the key's own


class Bodies:
    """Reads bodies, as many at once as there is room for; others wait in order.

    Args:
        limit: bytes of one body.
        most: bytes of all large bodies, beside one of each key.

    Attributes:
        held: bytes of those that are read beside keys' own.
        own: keys that have a body in the room of their own.
        waiting: bodies that wait for room, in order.
    """

    def __init__(self, limit: int, most: int) -> None:
        self.limit = limit
        self.most = max(limit, most)
        self.held = 0
        self.own: set[str] = set()
        self.waiting: dict[_Waiting, None] = {}

    @asynccontextmanager
    async def read(self, request: Request, key: str) -> AsyncIterator[bytes]:
        """A body; its memory counts until the block ends, so let go of it there.

        Raises:
            ApiError: it is too long (413), too slow (408), or there was no room for it (503).
        """
        declared = declared_length(request)
        size = self.limit if declared is None else declared
        if size > self.limit:
            size = 0  # it is refused, and nothing of it kept
        async with self.room(key, size):
            yield await read_limited(request, self.limit)

    @asynccontextmanager
    async def room(self, key: str, size: int) -> AsyncIterator[None]:
        """Room for `size` bytes of a key; for more than there is, all of it."""
        if size <= SMALL_BYTES:
            yield
            return
        size = min(size, self.most)
        is_own = await self._take(key, size)
        try:
            yield
        finally:
            self._give_back(key, size, is_own)

    async def _take(self, key: str, size: int) -> bool:
        """Take room, when there is some; returns whether it is the key's own."""
        one = _Waiting(key, size, asyncio.get_running_loop().create_future())
        self.waiting[one] = None
        self._serve()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await one.came
        except BaseException as error:
            self.waiting.pop(one, None)
            if one.came.done() and not one.came.cancelled():
                self._give_back(key, size, one.came.result())
            else:
                self._serve()  # those behind it may have room
            if isinstance(error, TimeoutError):
                raise self._no_room() from None
            raise

    def _no_room(self) -> ApiError:
        return ApiError(
            503,
            f"bodies of {self.held} bytes are being read, limit is {self.most}, and none ended "
            f"within {BODY_SECONDS:.0f} s: try again later, or raise the server's max_bodies",
            code="bodies_full",
            headers={"Retry-After": f"{RETRY_SECONDS}", "Connection": "close"},
        )

    def _give_back(self, key: str, size: int, is_own: bool) -> None:
        if is_own:
            self.own.discard(key)
        else:
            self.held -= size
        self._serve()

    def _serve(self) -> None:
        """Let in who has room: with the key's own at once, else in order."""
        is_first = True
        for one in list(self.waiting):
            if one.came.done():  # cancelled: its `_take` is about to see that
                continue
            is_own = one.key not in self.own
            fits = is_first and self.held + one.size <= self.most
            if not is_own and not fits:
                is_first = False
                continue
            if is_own:
                self.own.add(one.key)
            else:
                self.held += one.size
            del self.waiting[one]
            one.came.set_result(is_own)

"""The engine's snapshot for many readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from onestem.server.errors import ApiError
from onestem.server.link.client import EngineClient

FRESH_SECONDS = 0.5


class SnapshotCache:
    """The engine's snapshot, asked for at most twice a second for any number of readers.

    Args:
        on_new: called with each new one.
    """

    def __init__(self, client: EngineClient, on_new: Callable[[dict[str, Any]], object]) -> None:
        self._client = client
        self._on_new = on_new
        self._lock = asyncio.Lock()
        self._value: dict[str, Any] = {}
        self._at = 0.0

    async def get(self) -> dict[str, Any]:
        """The snapshot (`snapshot_of`); empty while there is no engine."""
        async with self._lock:
            if time.monotonic() - self._at >= FRESH_SECONDS:
                try:
                    self._value = await self._client.ask("snapshot")
                    self._on_new(self._value)
                except ApiError:
                    self._value = {}
                self._at = time.monotonic()
        return self._value

    def last(self) -> dict[str, Any]:
        """The one that was got last, however old."""
        return self._value

"""How many tokens make a chunk of a stream.

What a chunk costs the server's process (a wake-up, an event, HTTP framing, a system call) hardly
depends on its tokens. One core writes so many chunks in a second; where streams get more tokens
than that, readers would wait for the core, and newcomers behind them. So chunks grow with the
tokens that come, and nobody waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["ChunkSize"]

CHUNKS_PER_SECOND = 8000
SECONDS = 0.25  # between looks at how many tokens come


class ChunkSize:
    """Of all streams of a server.

    Args:
        least: tokens of a chunk when few streams run.

    Attributes:
        tokens: of a chunk now.
    """

    def __init__(self, least: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens = least
        self._least = least
        self._clock = clock
        self._since = clock()
        self._count = 0

    def note(self, num_tokens: int) -> None:
        """So many tokens have come for streams."""
        self._count += num_tokens
        now = self._clock()
        elapsed = now - self._since
        if elapsed >= SECONDS:
            each = self._count / elapsed / CHUNKS_PER_SECOND
            self.tokens = max(self._least, math.ceil(each))
            self._since, self._count = now, 0

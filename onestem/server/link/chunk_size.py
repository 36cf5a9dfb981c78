"""How many tokens make a chunk of a stream.

What a chunk costs the server's process (a wake-up, an event, HTTP framing, a system call) hardly
depends on its tokens. One core writes CHUNKS_PER_SECOND of them; where streams get more tokens
than that, readers and new requests would wait for the core. So chunks grow with the rate of
tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

CHUNKS_PER_SECOND = 8000
SECONDS = 0.25  # between looks at how many tokens come


class ChunkSize:
    """The chunk size of all streams of a server.

    Args:
        least: tokens of a chunk when few streams run.

    Attributes:
        tokens: tokens of a chunk now.
    """

    def __init__(self, least: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens = least
        self._least = least
        self._clock = clock
        self._since = clock()
        self._count = 0

    def note(self, num_tokens: int) -> None:
        """Count tokens that have come for streams."""
        self._count += num_tokens
        now = self._clock()
        elapsed = now - self._since
        if elapsed >= SECONDS:
            each = self._count / elapsed / CHUNKS_PER_SECOND
            self.tokens = max(self._least, math.ceil(each))
            self._since, self._count = now, 0

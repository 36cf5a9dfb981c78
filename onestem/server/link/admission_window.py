"""When new requests may join those that run.

They may join at any step, but a step with prompts has rows of its own to lay out and to launch.
So where many run, new requests wait a little for one another, and join together.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from onestem.engine.schedule.queue import Gate, Gatekeeper
from onestem.request import Request

SECONDS_PER_STREAM = 0.00004
LONGEST_WAIT = 0.02
ENOUGH = 24  # new requests that need not wait for more


class AdmissionWindow:
    """A gate of the engine's queue, in front of the engine's own. The queue holds new requests in
    the order of their arrival until it opens.

    Args:
        gate: asked about those that may join.
    """

    def __init__(self, gate: Gatekeeper, clock: Callable[[], float] = time.monotonic) -> None:
        self._gate = gate
        self._clock = clock
        self._is_open = False
        self._joined_at = float("-inf")

    def __call__(self, request: Request, key: str, weight: float) -> Gate:
        answer = self._gate(request, key, weight) if self._is_open else Gate.WAIT
        if answer is Gate.OPEN:
            self._joined_at = self._clock()
        return answer

    def close(self) -> None:
        """Let nobody join until the next `look`."""
        self._is_open = False

    def look(self, num_streams: int, num_held: int) -> None:
        """Open, if it is time for the `num_held` at the gate to join `num_streams` requests."""
        patience = min(num_streams * SECONDS_PER_STREAM, LONGEST_WAIT)
        self._is_open = num_held >= ENOUGH or self._clock() - self._joined_at >= patience

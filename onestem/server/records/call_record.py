"""What a call leaves when it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from onestem.openai.schema import Kind
from onestem.request import Request, RequestMetrics, Rerendered
from onestem.server.link.messages import Delta

__all__ = ["CallRecord", "Outcome"]

Outcome = Literal["stop", "length", "abort", "error", "timeout", "refused"]


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """A call that has ended, and with which the engine is done.

    Attributes:
        id, kind, requests: see `Call`.
        key: name of the key that it is of.
        app: name of the prefix that its prompt begins with, "" if none.
        created: unix seconds; arrived: of `time.monotonic()`.
        seconds: that it took.
        ended: number of a request -> its end; without those that the engine never began.
        rerendered: where a chat is written differently than before.
    """

    id: str
    kind: Kind
    key: str
    app: str
    outcome: Outcome | None
    created: int
    arrived: float
    seconds: float
    requests: Sequence[Request]
    ended: Mapping[int, Delta]
    rerendered: Rerendered | None = None

    @property
    def metrics(self) -> list[RequestMetrics]:
        """Of the requests in `ended`, in their order."""
        deltas = [self.ended[number] for number in sorted(self.ended)]
        return [delta.metrics for delta in deltas if delta.metrics is not None]

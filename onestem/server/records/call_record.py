"""What is recorded of a call when it has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from onestem.openai.schema import Kind
from onestem.request import Request, RequestMetrics, Rerendered
from onestem.server.link.messages import Delta
from onestem.server.objects.tenants import Tenant

Outcome = Literal["stop", "length", "abort", "error", "timeout", "refused"]


@dataclass(kw_only=True)
class CallRecord:
    """A call, as far as its end is recorded.

    Attributes:
        id: `chatcmpl-...`, `cmpl-...` or `score-...`; its requests are called `id-0`, `id-1`, ...
        requests: one per prompt.
        app: name of the prefix that its prompt begins with, "" if none.
        created: unix seconds; arrived: of `time.monotonic()`.
        outcome, took: how it ended, and after how many seconds.
        ended: number of a request -> its end; without those that the engine never began.
    """

    id: str
    kind: Kind
    tenant: Tenant
    requests: Sequence[Request]
    app: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    arrived: float
    outcome: Outcome | None = None
    took: float = 0.0
    ended: dict[int, Delta] = field(init=False, default_factory=dict)

    @property
    def deltas(self) -> list[Delta]:
        """The last delta of each request that has ended, in the prompts' order."""
        return [self.ended[number] for number in sorted(self.ended)]

    @property
    def metrics(self) -> list[RequestMetrics]:
        """Of the requests that have ended, in the prompts' order."""
        return [delta.metrics for delta in self.deltas if delta.metrics is not None]

    @property
    def rerendered(self) -> Rerendered | None:
        """Where a chat is written differently than before, once it has ended."""
        if self.kind != "chat" or not self.deltas or self.deltas[0].reuse is None:
            return None
        return self.deltas[0].reuse.rerendered

    def latencies(self, metrics: RequestMetrics) -> tuple[float | None, float | None]:
        """Seconds to a request's first token, and for each after it; None where there was none."""
        if metrics.first_token_time is None:
            return None, None
        first = max(0.0, metrics.first_token_time - self.arrived)
        rest = metrics.num_output_tokens / self.requests[0].params.n - 1
        if metrics.finished_time is None or rest < 1:
            return first, None
        return first, (metrics.finished_time - metrics.first_token_time) / rest

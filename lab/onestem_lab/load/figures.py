"""Outcomes of requests and the figures of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Outcome", "distribution", "summary", "within_limit"]


@dataclass
class Outcome:
    """The outcome of one request. Times are seconds since the run began.

    Attributes:
        arrival: when the schedule says it comes; latencies count from here, so that a late client
            hides nothing.
        sent: when it was sent.
        token_times: when each chunk that brought tokens came.
        ended: when the stream had ended, or had failed.
        faults: what is wrong with the stream (see `Answer`).
        failure: why there is no stream: a refusal, a broken connection, a time out.
    """

    index: int
    app: int
    arrival: float
    asked_tokens: int
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    faults: list[str] = field(default_factory=list)
    failure: str | None = None

    @property
    def ok(self) -> bool:
        return not self.faults and self.failure is None and self.output_tokens > 0

    @property
    def ttft(self) -> float:
        return (self.token_times[0] if self.token_times else self.ended) - self.arrival

    @property
    def per_token(self) -> float:
        """Seconds per output token after the first one; 0 for an answer of one token."""
        if self.output_tokens < 2 or not self.token_times:
            return 0.0
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def normalised(self) -> float:
        """End-to-end seconds per output token (RelayAttention, section 4.3)."""
        return (self.ended - self.arrival) / self.output_tokens


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, 90th and 99th percentile (linear interpolation) and maximum."""
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {
        "mean": float(np.mean(values)),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(np.max(values)),
    }


def within_limit(outcomes: Sequence[Outcome], limit: float) -> bool:
    """Whether the 90th percentile of normalised latency is at most `limit` seconds per token.

    That is: at least nine of ten requests stay within it. A failed one does not.
    """
    good = sum(outcome.ok and outcome.normalised <= limit for outcome in outcomes)
    return good >= 0.9 * len(outcomes)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of one run; latencies in seconds, of requests that were answered correctly."""
    good = [outcome for outcome in outcomes if outcome.ok]
    gaps = [gap for outcome in good for gap in np.diff(outcome.token_times)]
    seconds = max((outcome.ended for outcome in outcomes), default=0.0)
    problems = Counter(fault for outcome in outcomes for fault in outcome.faults)
    problems.update(outcome.failure for outcome in outcomes if outcome.failure)
    return {
        "requests": len(outcomes),
        "answered": len(good),
        "failed": sum(outcome.failure is not None for outcome in outcomes),
        "torn": sum(bool(outcome.faults) for outcome in outcomes),
        "problems": dict(problems.most_common(10)),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds if seconds else 0.0,
        "output_tokens_per_s": sum(o.output_tokens for o in good) / seconds if seconds else 0.0,
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in good),
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "output_tokens": sum(outcome.output_tokens for outcome in good),
        "ttft": distribution([outcome.ttft for outcome in good]),
        "per_token": distribution([o.per_token for o in good if o.output_tokens > 1]),
        "between_chunks": distribution(gaps),
        "normalised": distribution([outcome.normalised for outcome in good]),
        "late_by_max": max((o.sent - o.arrival for o in outcomes if o.sent), default=0.0),
    }

"""The last minutes for the page: one entry a second, and the last calls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from onestem.request import RequestMetrics, Reuse
from onestem.server.records.call_record import CallRecord

SECONDS = 300
RATE_SECONDS = 5  # window of rates, so that the many tokens of one step or report make no peak
TRAILING_SECONDS = 10.0
MOST_CALLS = 100
COUNTERS = {
    "prompt_tokens": "logical_prompt_tokens",
    "computed_tokens": "processed_prompt_tokens",
    "output_tokens": "output_tokens",
}
SERIES = (
    "time",
    *COUNTERS,
    *("running", "waiting", "kv_used_tokens"),
    *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"),
)
TOKENS = ("prompt_tokens", "cached_tokens", "host_tokens", "disk_tokens", "output_tokens")
TOTALS = ("requests", *TOKENS, "refused", "aborted", "failed")

# The text of a token, to explain where a match ended.
TokenText = Callable[[int], str | None]


class History:
    """Samples once a second; `note` as calls end.

    Args:
        token_text: of a token, where there is a tokenizer.
        clock: seconds.
    """

    def __init__(self, token_text: TokenText, clock: Callable[[], float] = time.monotonic) -> None:
        self._token_text = token_text
        self._clock = clock
        self._rows: deque[dict[str, float | None]] = deque(maxlen=SECONDS)
        self._counts: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=RATE_SECONDS)
        self._counts.append((clock(), {}))
        self._latencies: deque[tuple[float, float | None, float | None]] = deque(maxlen=4096)
        self.calls: deque[dict[str, Any]] = deque(maxlen=MOST_CALLS)
        self.totals = dict.fromkeys(TOTALS, 0)

    def sample(
        self, stats: Mapping[str, float], *, running: int, waiting: int, kv_used: int | None
    ) -> None:
        """Enter the second that has passed; `kv_used` in tokens, None where it is unknown."""
        row: dict[str, float | None] = {"time": time.time(), "running": running}
        row |= {"waiting": waiting, "kv_used_tokens": kv_used}
        row |= self._rates(stats)
        first, each = self._trailing()
        row |= {"ttft_p50": _quantile(first, 0.5), "ttft_p99": _quantile(first, 0.99)}
        row |= {"tpot_p50": _quantile(each, 0.5), "tpot_p99": _quantile(each, 0.99)}
        self._rows.append(row)

    def _rates(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Rates per second by the clock: samples may be more than a second apart."""
        now = self._clock()
        then, before = self._counts[0]
        self._counts.append((now, dict(stats)))
        return {
            name: (stats.get(counter, 0) - before.get(counter, 0)) / (now - then)
            for name, counter in COUNTERS.items()
        }

    def _trailing(self) -> tuple[list[float], list[float]]:
        since = self._clock() - TRAILING_SECONDS
        recent = [entry for entry in self._latencies if entry[0] >= since]
        first = sorted(entry[1] for entry in recent if entry[1] is not None)
        each = sorted(entry[2] for entry in recent if entry[2] is not None)
        return first, each

    def series(self, after: float = 0.0) -> dict[str, list[float | None]]:
        """By name, one entry per second since `after` (unix seconds)."""
        rows = [row for row in self._rows if (row["time"] or 0) > after]
        return {name: [row[name] for row in rows] for name in SERIES}

    def note(self, call: CallRecord) -> None:
        """Enter a call that has ended."""
        self.totals["requests"] += len(call.requests)
        for outcome, name in (("abort", "aborted"), ("refused", "refused")):
            self.totals[name] += call.outcome == outcome
        self.totals["failed"] += call.outcome in ("error", "timeout")
        for part, delta in sorted(call.ended.items()):
            if delta.metrics is not None:
                self._note_request(call, part, delta.metrics, delta.reuse)
        if not call.ended:
            nothing = RequestMetrics(num_prompt_tokens=len(call.requests[0].prompt_token_ids))
            self._note_request(call, 0, nothing, None)

    def _note_request(
        self, call: CallRecord, part: int, metrics: RequestMetrics, reuse: Reuse | None
    ) -> None:
        first, each = call.latencies(metrics)
        self._latencies.append((self._clock(), first, each))
        tokens = {name: getattr(metrics, f"num_{name}") for name in TOKENS}
        for name, count in tokens.items():
            self.totals[name] += count
        self.calls.appendleft(
            {
                "id": call.requests[part].request_id,
                "key": call.tenant.name or None,
                "app": call.app or None,
                "endpoint": "completions" if call.kind == "completion" else call.kind,
                "time": call.created,
                **tokens,
                "ttft": first,
                "tpot": each,
                "seconds": call.took,
                "finish": call.outcome,
                "reuse": self._explained(reuse),
            }
        )

    def _explained(self, reuse: Reuse | None) -> dict[str, Any] | None:
        """Where and why a match ended, for a person."""
        if reuse is None:
            return None
        source = "earlier request" if reuse.matched_tokens else "none"
        return {
            "matched_tokens": reuse.matched_tokens,
            "source": source if reuse.prefix is None else f"prefix {_short_name(reuse.prefix)}",
            "ended": reuse.ended,
            **({} if reuse.state_at is None else {"state_at": reuse.state_at}),
            "at": reuse.matched_tokens if reuse.ended == "differs" else None,
            "expected": self._token_text(reuse.there[0]) if reuse.there else None,
            "got": None if reuse.here is None else self._token_text(reuse.here),
        }


def _short_name(pin_name: str) -> str:
    """A prefix's name, from the name it is pinned under."""
    parts = pin_name.split("/")
    return parts[1] if len(parts) > 1 else pin_name


def _quantile(values: list[float], share: float) -> float | None:
    """The value below which `share` of sorted values are."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else None

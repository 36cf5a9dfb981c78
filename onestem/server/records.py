"""Records of calls: metrics, the history that the page draws, what was rerendered."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from onestem.request import Request, RequestMetrics, Rerendered
from onestem.server.api.calls import Call
from onestem.server.logs import log
from onestem.threads import resident_bytes

if TYPE_CHECKING:
    from onestem.server.link.client import EngineClient

__all__ = ["History", "Metrics", "RerenderedLog", "kind_of", "latencies"]

MOST_APPS = 256
LABELS = ("key", "app", "endpoint")
FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
ENGINE_COUNTS = {
    "steps": "Steps computed.",
    "logical_prompt_tokens": "Prompt tokens of all sequences.",
    "processed_prompt_tokens": "Prompt tokens computed.",
    "output_tokens": "Tokens sampled.",
    "num_preempted": "Sequences that were preempted.",
    "shared_read_tokens": "Reads of stored tokens saved: one read served several sequences.",
}


class _EngineCollector(Collector):
    """The engine's own counts at the time of a scrape."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.pages: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        client = self._client
        for name, text in ENGINE_COUNTS.items():
            if name in client.stats:
                yield CounterMetricFamily(f"onestem_engine_{name}", text, client.stats[name])
        restarts = client.supervisor.restarts
        yield CounterMetricFamily("onestem_engine_restarts", "Engine starts.", restarts)
        up = float(client.supervisor.state == "running")
        yield GaugeMetricFamily("onestem_engine_up", "Whether the engine runs.", up)
        yield GaugeMetricFamily(
            "onestem_running_sequences", "Sequences in the engine.", client.num_running
        )
        waiting = client.requests.num_waiting
        yield GaugeMetricFamily("onestem_waiting_requests", "Requests that wait.", waiting)
        yield from self._memory()
        yield from self._bytes()

    def _bytes(self) -> Iterator[Metric]:
        """Memory in bytes: what KV memory may take, and what each process has."""
        facts = self._client.facts
        if facts is not None:
            size = facts.kv_tokens * facts.kv_bytes_per_token
            yield GaugeMetricFamily("onestem_kv_bytes", "KV memory, used or not.", size)
        resident = GaugeMetricFamily(
            "onestem_resident_bytes", "Memory that a process has in use.", labels=["process"]
        )
        for name, pid in (("server", os.getpid()), ("engine", self._client.supervisor.pid)):
            there = None if pid is None else resident_bytes(pid)
            if there is not None:
                resident.add_metric([name], there)
        yield resident

    def _memory(self) -> Iterator[Metric]:
        usage = GaugeMetricFamily("onestem_kv_tokens", "KV memory in tokens.", labels=["state"])
        size = self.pages.get("size", 0)
        for state in ("free", "held", "cached", "prefix", "interactive", "job"):
            if state in self.pages:
                usage.add_metric([state], size * self.pages[state])
        yield usage


class Metrics:
    """Counts and times of requests, by key, app (the prefix that a prompt begins with) and
    endpoint."""

    def __init__(self, client: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._apps: set[str] = set()
        self._engine = _EngineCollector(client)
        self._registry.register(self._engine)
        self._first_token = self._histogram(
            "onestem_time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN
        )
        self._per_token = self._histogram(
            "onestem_time_per_output_token_seconds", "Between tokens after the first.", PER_TOKEN
        )
        self._whole = self._histogram(
            "onestem_request_seconds", "From arrival to the last token.", WHOLE
        )
        self._tokens = {
            name: self._counter(f"onestem_{name}", text)
            for name, text in (
                ("prompt_tokens", "Prompt tokens of requests that ended."),
                ("cached_prompt_tokens", "Of these, tokens whose KV was stored already."),
                ("output_tokens", "Tokens of answers."),
                ("request_preemptions", "Times that a request was preempted."),
            )
        }
        self._requests = Counter(
            "onestem_requests", "Requests that ended, by outcome.", (*LABELS, "outcome"),
            registry=self._registry,
        )  # fmt: skip
        self._errors = Counter(
            "onestem_http_errors", "Answers with an error.", ("status",), registry=self._registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self._registry)

    def note(self, call: Call, seconds: float) -> None:
        """A call has ended."""
        labels = (call.tenant.name, self._app(call), call.kind)
        self._requests.labels(*labels, call.outcome or "abort").inc()
        self._whole.labels(*labels).observe(seconds)
        for metrics in call.metrics:
            if metrics.first_token_time is None:
                continue
            self._first_token.labels(*labels).observe(
                max(0.0, metrics.first_token_time - call.arrived)
            )
            if metrics.num_output_tokens > 1 and metrics.finished_time is not None:
                spent = metrics.finished_time - metrics.first_token_time
                rest = metrics.num_output_tokens / call.requests[0].params.n - 1
                self._per_token.labels(*labels).observe(spent / max(1, rest))
            self._tokens["prompt_tokens"].labels(*labels).inc(metrics.num_prompt_tokens)
            self._tokens["cached_prompt_tokens"].labels(*labels).inc(metrics.num_cached_tokens)
            self._tokens["output_tokens"].labels(*labels).inc(metrics.num_output_tokens)
            self._tokens["request_preemptions"].labels(*labels).inc(metrics.num_preempted)

    def _app(self, call: Call) -> str:
        """Its application's label. Names are limited: those that keys make up could fill memory."""
        if len(self._apps) < MOST_APPS:
            self._apps.add(call.app)
        return call.app if call.app in self._apps else "other"

    def note_error(self, status: int) -> None:
        self._errors.labels(str(status)).inc()

    def text(self, pages: Mapping[str, Any]) -> bytes:
        """All metrics as text; `pages`: those of the engine's snapshot, or empty."""
        self._engine.pages = pages
        return generate_latest(self._registry)


# ----------------------------------------------------------------------------- history
# The last minutes for the page: one entry per second, and the last calls.

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
TOTALS = (
    *("requests", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("refused", "aborted", "failed"),
)

# The text of a token, to explain where a match ended.
TokenText = Callable[[int], str | None]


def latencies(call: Call, metrics: RequestMetrics) -> tuple[float | None, float | None]:
    """Seconds to the first token, and per token after it."""
    if metrics.first_token_time is None:
        return None, None
    first = max(0.0, metrics.first_token_time - call.arrived)
    rest = metrics.num_output_tokens / call.requests[0].params.n - 1
    if metrics.finished_time is None or rest < 1:
        return first, None
    return first, (metrics.finished_time - metrics.first_token_time) / rest


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
        """A second has passed."""
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

    def note(self, call: Call, seconds: float) -> None:
        """A call has ended."""
        self.totals["requests"] += len(call.requests)
        for outcome, name in (("abort", "aborted"), ("refused", "refused")):
            self.totals[name] += call.outcome == outcome
        self.totals["failed"] += call.outcome in ("error", "timeout")
        for part, delta in sorted(call.inbox.ended.items()):
            if delta.metrics is not None:
                self._note_request(call, part, delta.metrics, delta.reuse, seconds)
        if not call.inbox.ended:
            nothing = RequestMetrics(num_prompt_tokens=len(call.requests[0].prompt_token_ids))
            self._note_request(call, 0, nothing, None, seconds)

    def _note_request(
        self, call: Call, part: int, metrics: RequestMetrics, reuse: Any, seconds: float
    ) -> None:
        first, each = latencies(call, metrics)
        self._latencies.append((self._clock(), first, each))
        for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
            self.totals[name] += getattr(metrics, f"num_{name}")
        self.calls.appendleft(
            {
                "id": call.requests[part].request_id,
                "key": call.tenant.name or None,
                "app": call.app or None,
                "endpoint": "completions" if call.kind == "completion" else call.kind,
                "time": call.created,
                "prompt_tokens": metrics.num_prompt_tokens,
                "cached_tokens": metrics.num_cached_tokens,
                "output_tokens": metrics.num_output_tokens,
                "ttft": first,
                "tpot": each,
                "seconds": seconds,
                "finish": call.outcome,
                "reuse": self._explained(reuse),
            }
        )

    def _explained(self, reuse: Any) -> dict[str, Any] | None:
        """Where and why a match ended, for a person."""
        if reuse is None:
            return None
        source = "earlier request" if reuse.matched_tokens else "none"
        return {
            "matched_tokens": reuse.matched_tokens,
            "source": source if reuse.prefix is None else f"prefix {_short_name(reuse.prefix)}",
            "ended": reuse.ended,
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


# ----------------------------------------------------------------------------- rerendered
# Reports once for each application why its conversations miss their cached tokens.

SHOWN = 16  # tokens of a prompt from where it differs
MOST_TOLD = 1000  # maximum keys and applications that are remembered
# Markers that models write their reasoning between.
REASONING = re.compile(r"</?think|\[/?THINK\]|<\|channel\|>|<\|?(begin|end)_of_thought", re.I)

Decode = Callable[[Sequence[int]], str]


class RerenderedLog:
    """An `info` line for each key and application: where a conversation first differed from what
    was cached, and how. Texts are users': they are a `debug` line.

    Args:
        decode: the text of token ids, control tokens with their names.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._told: set[tuple[str, str]] = set()

    def note(self, call: Call) -> None:
        """A call has ended."""
        rerendered, who = call.rerendered, (call.tenant.name, call.app)
        if rerendered is None or who in self._told or len(self._told) >= MOST_TOLD:
            return
        self._told.add(who)
        request, at = call.requests[0], rerendered.at
        earlier = self._decode(rerendered.earlier)
        now = self._decode(request.prompt_token_ids[at : at + SHOWN])
        log.info(
            "rerendered",
            id=call.id,
            key=call.tenant.name or None,
            app=call.app or None,
            tokens=rerendered.num_tokens,
            at=at,
            offset=rerendered.offset,
            kind=kind_of(rerendered, request, earlier, now),
        )
        log.debug("rerendered_texts", id=call.id, earlier=earlier, now=now)


def kind_of(rerendered: Rerendered, request: Request, earlier: str, now: str) -> str:
    """What differs, as far as the first tokens tell: `generation_prompt` (what the template writes
    before an answer), `reasoning`, `tokens` (the same text in other tokens), `whitespace`, `text`.
    """
    if rerendered.offset < request.prefilled_tokens:
        return "generation_prompt"
    if REASONING.search(earlier) or REASONING.search(now):
        return "reasoning"
    if _agree(earlier, now):
        return "tokens"
    return "whitespace" if _agree("".join(earlier.split()), "".join(now.split())) else "text"


def _agree(a: str, b: str) -> bool:
    """Whether two texts agree as far as both go; the last character may be cut in two."""
    length = min(len(a), len(b))
    return length > 1 and a[: length - 1] == b[: length - 1]

"""Counts and times for Prometheus."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from onestem.server.link.client import EngineClient
from onestem.server.records.call_record import CallRecord
from onestem.threads import resident_bytes

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
REQUEST_COUNTS = {  # attributes of `RequestMetrics`
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that ended."),
    "num_cached_tokens": ("cached_prompt_tokens", "Of these, tokens whose KV was stored already."),
    "num_host_tokens": ("host_prompt_tokens", "Of the stored ones, from host memory."),
    "num_disk_tokens": ("disk_prompt_tokens", "Of the stored ones, from files."),
    "num_output_tokens": ("output_tokens", "Tokens of answers."),
    "num_preempted": ("request_preemptions", "Times that a request was preempted."),
}


class _EngineCollector(Collector):
    """The engine's own counts at the time of a scrape."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.snapshot: Mapping[str, Any] = {}

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
        if "grammar_bytes" in self.snapshot:
            yield GaugeMetricFamily(
                "onestem_grammar_bytes",
                "Compiled grammars that the engine keeps.",
                self.snapshot["grammar_bytes"],
            )
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
        pages = self.snapshot.get("pages", {})
        for state in ("free", "held", "cached", "prefix", "interactive", "job"):
            if state in pages:
                usage.add_metric([state], pages["size"] * pages[state])
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
        self._counters = {
            attribute: Counter(f"onestem_{name}", text, LABELS, registry=self._registry)
            for attribute, (name, text) in REQUEST_COUNTS.items()
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

    def note(self, call: CallRecord) -> None:
        """Count a call that has ended."""
        labels = (call.tenant.name, self._app(call.app), call.kind)
        self._requests.labels(*labels, call.outcome or "abort").inc()
        self._whole.labels(*labels).observe(call.took)
        for metrics in call.metrics:
            first, each = call.latencies(metrics)
            if first is None:
                continue
            self._first_token.labels(*labels).observe(first)
            if each is not None:
                self._per_token.labels(*labels).observe(each)
            for attribute, counter in self._counters.items():
                counter.labels(*labels).inc(getattr(metrics, attribute))

    def _app(self, app: str) -> str:
        """An application's label. Names are limited: those that keys make up could fill memory."""
        if len(self._apps) < MOST_APPS:
            self._apps.add(app)
        return app if app in self._apps else "other"

    def note_error(self, status: int) -> None:
        """Count an answer that was an error, by its HTTP status."""
        self._errors.labels(str(status)).inc()

    def text(self, snapshot: Mapping[str, Any]) -> bytes:
        """All metrics as text; `snapshot`: the engine's, or empty."""
        self._engine.snapshot = snapshot
        return generate_latest(self._registry)

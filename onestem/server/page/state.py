"""What the page shows, in plain values: GET /internal/state and the events of /internal/events."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from onestem.server.api.streams import event
from onestem.server.service import Service

MOST_JOBS = 50


async def state_of(service: Service, history_after: float = 0.0) -> dict[str, Any]:
    """All of the state; of the history only what came after a time (unix seconds)."""
    snapshot = await service.snapshots.get()
    jobs = await asyncio.to_thread(service.store.recent_batches, MOST_JOBS)
    client = service.client
    runs = snapshot.get("runs", [])
    return {
        "time": time.time(),
        "model": _model(service),
        "engine": {
            "state": client.supervisor.state,
            "pid": client.supervisor.pid,
            "restarts": client.supervisor.restarts,
            "since": client.supervisor.since,
            "error": client.supervisor.error,
            "steps": int(client.stats.get("steps", 0)),
            "job_step_seconds": client.job_step_seconds,
        },
        "kv": _memory(service, snapshot),
        "grammar_bytes": snapshot.get("grammar_bytes", 0),
        "runs": [_run(service, run) for run in runs],
        "runs_left_out": snapshot.get("num_runs", 0) - len(runs),
        "queue": _queue(service),
        "totals": {
            **service.records.history.totals,
            "computed_tokens": int(client.stats.get("processed_prompt_tokens", 0)),
            "num_preempted": int(client.stats.get("num_preempted", 0)),
            "steps": int(client.stats.get("steps", 0)),
            "shared_read_tokens": client.stats.get("shared_read_tokens"),
        },
        "history": service.records.history.series(history_after),
        "prefixes": [_prefix(prefix) for prefix in service.prefixes.everyone()],
        "jobs": [_job(owner, record) for owner, record in jobs],
        "requests": list(service.records.history.calls),
    }


def _model(service: Service) -> dict[str, Any]:
    facts = service.client.facts
    named: dict[str, Any] = {"name": service.model.names[0]}
    if facts is None:
        return named
    for name in ("max_model_len", "page_size", "dtype", "device", "share"):
        named[name] = getattr(facts.options, name)
    return named | {"vocab_size": facts.vocab_size, "attention": facts.options.impl}


def _memory(service: Service, snapshot: Mapping[str, Any]) -> dict[str, Any]:
    pages = snapshot.get("pages", {})
    size = pages.get("size", 0)
    tokens = {name: count * size for name, count in pages.items() if name != "size"}
    held: Counter[str] = Counter()
    for holder in snapshot.get("holders", ()):
        held[_owner(service, holder["owner"], holder["name"])] += holder["pages"] * size
    held["cache"] = tokens.get("cached", 0)
    owners = [{"owner": name, "tokens": count} for name, count in held.items() if count]
    return {
        "total_tokens": tokens.get("total", 0),
        "free_tokens": tokens.get("free", 0),
        "cached_tokens": tokens.get("cached", 0),
        "held_tokens": tokens.get("held", 0),
        "owners": sorted(owners, key=lambda owner: -owner["tokens"]),
    }


def _owner(service: Service, kind: str, name: str) -> str:
    """The page's name for a holder of memory."""
    if kind == "job":
        return f"job {name}"
    if kind == "interactive":
        key = service.client.requests.key_of(name)
        return f"key {key}" if key else "requests"
    return f"prefix {service.prefixes.shown(name)}"


def _run(service: Service, run: Mapping[str, Any]) -> dict[str, Any]:
    first = list(run["first"])
    text = service.model.text(first) if service.model.tokenizer is not None else None
    named = ("id", "parent", "start", "tokens", "computed", "readers", "owner", "salted")
    shown = {name: run.get(name) for name in named}
    pinned = run["pinned"]
    shown["pinned"] = None if pinned is None else service.prefixes.shown(pinned)
    return {**shown, "first_token_ids": first, "text": text}


def _queue(service: Service) -> dict[str, Any]:
    client = service.client
    return {
        "waiting": client.requests.num_waiting,
        "running": client.num_running,
        "limit": client.requests.queue_limit,
        "by_key": [
            {"key": key or None, "waiting": waiting, "running": sent}
            for key, (waiting, sent) in client.requests.by_key().items()
        ],
    }


def _prefix(prefix: Any) -> dict[str, Any]:
    shown = prefix.describe()
    del shown["object"], shown["owner"], shown["kind"], shown["created_at"]
    return {**shown, "key": None if prefix.is_common else prefix.owner}


def _job(owner: str, record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": record["id"],
        "key": owner or None,
        "status": record["status"],
        **record["request_counts"],
        "created_at": record["created_at"],
    }


async def events(service: Service) -> AsyncGenerator[bytes, None]:
    """The state about once a second, until the server stops."""
    seen = 0.0
    while not service.stopping.is_set():
        state = await state_of(service, seen)
        seen = max([seen, *(at for at in state["history"]["time"] if at)])
        yield event(state, "state")
        try:
            await asyncio.wait_for(service.stopping.wait(), 1.0)
        except TimeoutError:
            continue

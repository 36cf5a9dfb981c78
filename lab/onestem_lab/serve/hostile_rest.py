"""What a server has left when all is over: nothing, and a right answer for each key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from onestem.server.objects.store import OPEN_STATUSES
from onestem_lab.serve.hostile_hand import Site, asked, judged
from onestem_lab.serve.hostile_pool import Case
from onestem_lab.serve.service import state

__all__ = ["rest"]

Json = dict[str, Any]

REST_SECONDS = 120.0


async def rest(site: Site, pool: Sequence[Case]) -> Json:
    """Cancel all batches, and say what is left then."""
    for client in site.clients.values():
        await _cancel_batches(client)
    now = await _at_rest(site.operator)
    short = next(case for case in pool if case.kind == "short" and not case.sampled)
    answers = {
        name: judged(short, await asked(client, short.path, short.body))[0]
        for name, client in site.clients.items()
    }
    return {
        "left": _left(now),
        "kv": now["kv"],
        "answers": answers,
        "num_preempted": now["totals"]["num_preempted"],
        "steps": now["totals"]["steps"],
    }


async def _at_rest(operator: httpx2.AsyncClient) -> Json:
    """The state when nothing runs any more, or after a while."""
    until = time.monotonic() + REST_SECONDS
    now = await state(operator)
    while _left(now) and time.monotonic() < until:
        await asyncio.sleep(0.5)
        now = await state(operator)
    return now


def _left(now: Json) -> Json:
    """What a state shows that should not be there when nobody asks: memory is free, cached, or
    pinned for prefixes."""
    kv, queue = now["kv"], now["queue"]
    held = {owner["owner"]: owner["tokens"] for owner in kv["owners"] if owner["owner"] != "cache"}
    pinned = sum(tokens for name, tokens in held.items() if name.startswith("prefix "))
    left = {
        "engine": now["engine"]["state"] if now["engine"]["state"] != "running" else None,
        "running": queue["running"] + queue["waiting"],
        "jobs": [job for job in now["jobs"] if job["status"] in OPEN_STATUSES],
        "holders": [name for name in held if not name.startswith("prefix ")],
        "held_tokens": kv["held_tokens"] - pinned,
        "unaccounted": kv["total_tokens"]
        - kv["free_tokens"]
        - kv["cached_tokens"]
        - kv["held_tokens"],
        "readers": {one["name"]: one["readers"] for one in now["prefixes"] if one["readers"]},
    }
    return {name: value for name, value in left.items() if value}


async def _cancel_batches(client: httpx2.AsyncClient) -> None:
    listed = (await client.get("/v1/batches?limit=10000")).json()["data"]
    for record in listed:
        if record["status"] in ("validating", "in_progress"):
            await client.post(f"/v1/batches/{record['id']}/cancel")
    until = time.monotonic() + REST_SECONDS
    while any(record["status"] in OPEN_STATUSES for record in listed) and time.monotonic() < until:
        await asyncio.sleep(0.2)
        listed = (await client.get("/v1/batches?limit=10000")).json()["data"]

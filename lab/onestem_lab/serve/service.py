"""Our server's own requests that the benchmarks need: its state, jobs, and memory at rest."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2

__all__ = ["at_rest", "engine_pid", "finished_job", "job_output", "post_job", "state"]


async def state(client: httpx2.AsyncClient) -> dict[str, Any]:
    """What the server's page shows."""
    answer = await client.get("/internal/state")
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


async def engine_pid(client: httpx2.AsyncClient) -> int:
    return int((await state(client))["engine"]["pid"])


async def at_rest(client: httpx2.AsyncClient, within: float = 60.0) -> dict[str, Any]:
    """KV memory once nothing runs or waits; `balanced`: free + cached == total."""
    limit = time.monotonic() + within
    while True:
        now = await state(client)
        kv, queue = now["kv"], now["queue"]
        idle = now["engine"]["state"] == "running" and not queue["running"] + queue["waiting"]
        balanced = kv["free_tokens"] + kv["cached_tokens"] == kv["total_tokens"]
        if (idle and balanced and kv["total_tokens"]) or time.monotonic() > limit:
            return {"idle": idle, "balanced": balanced, **_numbers(kv)}
        await asyncio.sleep(0.5)


async def post_job(client: httpx2.AsyncClient, lines: list[dict[str, Any]]) -> str:
    """Upload lines and start a batch of completions on them; its id."""
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    upload = await client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("job.jsonl", text)}
    )
    upload.raise_for_status()
    batch = {
        "input_file_id": upload.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    posted = await client.post("/v1/batches", json=batch)
    posted.raise_for_status()
    return str(posted.json()["id"])


async def finished_job(
    client: httpx2.AsyncClient, job_id: str, within: float = 600.0
) -> dict[str, Any]:
    """The batch once it has ended, or as it stands after `within` seconds."""
    limit = time.monotonic() + within
    while True:
        found = await client.get(f"/v1/batches/{job_id}")
        # Without an engine, jobs are still told about.
        found.raise_for_status()
        batch: dict[str, Any] = found.json()
        if batch["status"] in ("completed", "failed", "cancelled", "expired"):
            return batch
        if time.monotonic() > limit:
            return batch
        await asyncio.sleep(0.5)


async def job_output(client: httpx2.AsyncClient, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines of a finished batch's output."""
    answer = await client.get(f"/v1/files/{batch['output_file_id']}/content")
    answer.raise_for_status()
    return [json.loads(line) for line in answer.text.splitlines()]


def _numbers(kv: dict[str, Any]) -> dict[str, int]:
    return {name: value for name, value in kv.items() if isinstance(value, int)}

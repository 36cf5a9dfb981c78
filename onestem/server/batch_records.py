"""A batch as OpenAI's API shows it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from onestem.batch import Progress
from onestem.batch.fields import show
from onestem.batch.format import KIND_OF_URL
from onestem.server.errors import ApiError
from onestem.server.store import Row

__all__ = ["counts_of", "error_list", "new_batch", "now"]


def counts_of(progress: Progress) -> dict[str, int]:
    return {
        "total": progress.total,
        "completed": progress.done - progress.failed,
        "failed": progress.failed,
    }


def error_list(code: str, message: str) -> Row:
    entry = {"code": code, "message": message, "param": None, "line": None}
    return {"object": "list", "data": [entry]}


def now() -> int:
    return int(time.time())


TIMES = (
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def new_batch(body: Mapping[str, Any]) -> Row:
    for name in body:
        if name not in ("input_file_id", "endpoint", "completion_window", "metadata"):
            raise ApiError(400, f"unknown field in body: {show(name)}", param=name)
    file_id, endpoint = body.get("input_file_id"), body.get("endpoint")
    if not isinstance(file_id, str):
        raise ApiError(
            400, f"input_file_id is {show(file_id)}, expected a file's id", param="input_file_id"
        )
    if not isinstance(endpoint, str) or endpoint not in KIND_OF_URL:
        expected = " or ".join(KIND_OF_URL)
        raise ApiError(400, f"endpoint is {show(endpoint)}, expected {expected}", param="endpoint")
    window = body.get("completion_window")
    if window != "24h":
        raise ApiError(
            400,
            f"completion_window is {show(window)}, expected '24h' (batches do not expire here)",
            param="completion_window",
        )
    return {
        "id": f"batch_{os.urandom(12).hex()}",
        "object": "batch",
        "endpoint": endpoint,
        "errors": None,
        "input_file_id": file_id,
        "completion_window": window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now(),
        **dict.fromkeys(TIMES),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": _metadata(body.get("metadata")),
    }


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    good = isinstance(value, dict) and len(value) <= 16
    if not good or not all(isinstance(text, str) and len(text) <= 512 for text in value.values()):
        raise ApiError(
            400, f"metadata is {show(value)}, expected at most 16 texts by name", param="metadata"
        )
    metadata: dict[str, str] = value
    return metadata

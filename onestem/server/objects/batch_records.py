"""A batch as OpenAI's API shows it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from onestem.checked import check, without_nulls
from onestem.openai.schema import BatchBody
from onestem.server.objects.store import Row, now

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
    """The record of the batch that a body asks for; raises `RequestError` for a bad body."""
    asked = check(BatchBody, without_nulls(body))
    return {
        "id": f"batch_{os.urandom(12).hex()}",
        "object": "batch",
        "endpoint": asked.endpoint,
        "errors": None,
        "input_file_id": asked.input_file_id,
        "completion_window": asked.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now(),
        **dict.fromkeys(TIMES),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": asked.metadata,
    }

"""Makes lines of the result file from outputs, in the shapes of OpenAI's batch API.

    {"id": ..., "custom_id": ...,
     "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}
    {"id": ..., "custom_id": ..., "response": null,
     "error": {"code": ..., "message": ..., "line": ...}}

Nothing in a line depends on when or in which order it was computed. `created` is always 0, and ids
come from the job and the line:
* `id` is `batch_req_<job>_<line number in the input>`. It gives a line its place in the output, and
  identifies a finished file.
* `request_id` and the body's `id` come from a hash of the job and `custom_id`. So does the seed of
  a request without one.
The number of prompt tokens from the cache depends on the order, so it is not in `usage`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any


def result_id(job: str, line_number: int) -> str:
    """`id` of a line's result."""
    return f"batch_req_{job}_{line_number}"


def split_result_id(value: object) -> tuple[str, int] | None:
    """(job, line number) of an id that `result_id` made; None for any other value."""
    parts = value.split("_") if isinstance(value, str) else []
    if len(parts) != 4 or parts[:2] != ["batch", "req"]:
        return None
    if not (parts[3].isascii() and parts[3].isdecimal()):
        return None
    return parts[2], int(parts[3])


def line_number_of(request_id: str) -> int:
    """The input line of a job's request, by its id."""
    name = split_result_id(request_id)
    assert name is not None, f"a request of nobody: {request_id}"
    return name[1]


def _digest(job: str, custom_id: str) -> bytes:
    return hashlib.sha256(f"{job}\0{custom_id}".encode()).digest()


def derived_seed(job: str, custom_id: str) -> int:
    """The seed of a request without one: 63 bits."""
    return int.from_bytes(_digest(job, custom_id)[:8], "big") >> 1


def _line(record: Mapping[str, Any]) -> bytes:
    """One line of UTF-8 that stays one line under every notion of a line end."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in ("\u0085", "\u2028", "\u2029"):
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text.encode() + b"\n"


def error_line(job: str, line_number: int, custom_id: str | None, code: str, message: str) -> bytes:
    """The result of a line without an answer."""
    return _line(
        {
            "id": result_id(job, line_number),
            "custom_id": custom_id,
            "response": None,
            "error": {"code": code, "message": message, "line": line_number},
        }
    )


def answer_line(
    job: str, line_number: int, custom_id: str, body: Callable[[str], Mapping[str, Any]]
) -> bytes:
    """The result of a line whose request was answered; `body` makes its body, given an id."""
    name = _digest(job, custom_id).hex()[:24]
    return _line(
        {
            "id": result_id(job, line_number),
            "custom_id": custom_id,
            "response": {
                "status_code": 200,
                "request_id": f"req_{name}",
                "body": body(name),
            },
            "error": None,
        }
    )

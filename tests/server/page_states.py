"""States as the server sends them, for the tests of the page."""

from __future__ import annotations

import copy
from typing import Any

START = 1_760_000_000
EVIL = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"

RUNS = [
    # id, parent, start, tokens, computed, readers, pinned, text
    (1, None, 0, 800, 800, 9, "support", "You are a helpful assistant of the support desk."),
    (2, 1, 800, 100, 100, 1, None, "My bicycle squeaks."),
    (3, 1, 800, 200, 50, 2, None, EVIL),
    (4, 3, 1000, 40, 40, 1, None, None),
    (5, 3, 1000, 60, 60, 1, None, None),
    (6, None, 0, 300, 300, 0, True, "Something that nobody reads any more"),
]


def _request(
    number: int, cached: int, reuse: dict[str, Any] | None, **other: Any
) -> dict[str, Any]:
    return {
        "id": f"cmpl-{number}", "key": "alice", "app": None, "endpoint": "completions",
        "time": START + number, "prompt_tokens": 900, "cached_tokens": cached,
        "host_tokens": 0, "disk_tokens": 0, "output_tokens": 40,
        "ttft": 0.11, "tpot": 0.031, "seconds": 1.3, "finish": "stop", "reuse": reuse, **other,
    }  # fmt: skip


def _reuse(matched: int, source: str, ended: str, **other: Any) -> dict[str, Any]:
    given = {"at": None, "expected": None, "got": None, **other}
    return {"matched_tokens": matched, "source": source, "ended": ended, **given}


REQUESTS = [
    _request(9, 812, _reuse(812, "prefix support", "differs", at=812, expected="\n", got=EVIL)),
    _request(8, 899, _reuse(899, "earlier request", "prompt ended")),
    _request(7, 500, _reuse(500, "earlier request", "salt", at=500)),
    _request(6, 0, _reuse(0, "none", "evicted", at=0)),
    _request(5, 0, None, finish="error", ttft=None, tpot=None, key=None),
]


def state(seconds: int = 120, **changes: Any) -> dict[str, Any]:
    """A server that has run for some seconds, with a tree of two roots."""
    names = ("id", "parent", "start", "tokens", "computed", "readers", "pinned", "text")
    times = [START + i for i in range(seconds)]
    columns = {
        "prompt_tokens": 400, "computed_tokens": 100, "output_tokens": 250, "running": 12,
        "waiting": 3, "kv_used_tokens": 5536, "ttft_p50": 0.12, "ttft_p99": 0.4, "tpot_p50": 0.031,
        "tpot_p99": 0.05,
    }  # fmt: skip
    given = {
        "time": START + seconds,
        "model": {
            "name": "embedded", "max_model_len": 8192, "vocab_size": 2560, "page_size": 16,
            "dtype": "float32", "device": "cpu", "attention": "cpu", "share": "full",
        },
        "engine": {"state": "running", "restarts": 0, "since": START, "error": None},
        "kv": {
            "total_tokens": 65536, "free_tokens": 60000, "cached_tokens": 4000, "held_tokens": 1536,
            "owners": [
                {"owner": "cache", "tokens": 4000},
                {"owner": "prefix support", "tokens": 800},
                {"owner": "key alice", "tokens": 736},
            ],
        },
        "runs": [
            {
                **dict(zip(names, run)),
                "first_token_ids": [run[0], 55, 3],
                "owner": "prefix" if run[6] else "interactive",
                "salted": run[0] == 3,
            }
            for run in RUNS
        ],
        "runs_left_out": 7,
        "queue": {"waiting": 3, "running": 12, "limit": 1024, "by_key": []},
        "totals": {
            "requests": 100, "prompt_tokens": 1000000, "cached_tokens": 800000,
            "host_tokens": 0, "disk_tokens": 0,
            "computed_tokens": 200000, "output_tokens": 50000, "num_preempted": 4, "refused": 2,
            "aborted": 1, "failed": 0, "steps": 1000, "shared_read_tokens": 123,
        },
        "history": {"time": times, **{
            name: [value * (1 + (i % 60) / 60) for i in range(seconds)]
            for name, value in columns.items()
        }},
        "prefixes": [
            {
                "name": "support", "key": None, "version": 2, "ready": True, "tokens": 800,
                "computed_tokens": 800, "bytes": 3325952, "readers": 9, "hits": 90,
                "last_used": START + 50,
            },
            {
                "name": EVIL, "key": "alice", "version": 1, "ready": False, "tokens": 1000,
                "computed_tokens": 250, "bytes": 1000000, "readers": 0, "hits": 0,
                "last_used": None,
            },
        ],
        "jobs": [
            {
                "id": "batch_12", "key": "alice", "status": "in_progress", "total": 1000,
                "completed": 120, "failed": 5, "created_at": START,
            }
        ],
        "requests": REQUESTS,
    }  # fmt: skip
    return copy.deepcopy(given | changes)

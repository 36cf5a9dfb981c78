"""Logs for people: a line for each event, and nothing in it that a terminal would obey."""

from __future__ import annotations

import logging
import re
import sys

import pytest

from onestem.server.log_lines import line_of
from onestem.server.logs import default_format, log, set_up

REQUEST = {
    "id": "chatcmpl-1", "key": None, "app": None, "endpoint": "chat", "outcome": "stop",
    "prompt_tokens": 1034, "cached_tokens": 1000, "output_tokens": 20, "ttft": 0.05,
    "seconds": 0.4142,
}  # fmt: skip
REFUSED = {
    "id": "req-1", "method": "POST", "path": "/v1/completions", "status": 400,
    "code": "invalid_request", "param": "n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("event", "fields", "line"),
    [
        (
            "request", REQUEST,
            "POST /v1/chat/completions stop: 1034 prompt tokens (1000 cached), 20 answered, 0.41 s",
        ),
        (
            "request", {**REQUEST, "endpoint": "completion", "key": "alice", "app": "support"},
            "POST /v1/completions stop: 1034 prompt tokens (1000 cached), 20 answered, 0.41 s, "
            "key alice, prefix support",
        ),
        (
            "request", {**REQUEST, "endpoint": "score", "output_tokens": 0},
            "POST /v1/score stop: 1034 prompt tokens (1000 cached), 0 answered, 0.41 s",
        ),
        ("refused", REFUSED, "POST /v1/completions 400: invalid_request, n"),
        ("refused", {**REFUSED, "code": None, "param": None}, "POST /v1/completions 400"),
        ("refused", {**REFUSED, "path": "/\n\x1b[31mä\x9b\ud800"},
         "POST /\\n\\x1b[31mä\\x9b\\ud800 400: invalid_request, n"),
        ("starting", {"model": "embedded"}, "starting, model embedded"),
        ("model_found", {"model": "embedded", "path": "/m"}, "model found: /m"),
        ("loading", {"weights_bytes": 15 << 30, "dtype": "bfloat16"},
         "loading weights: 15 GiB, bfloat16"),
        ("loading", {"weights_bytes": 1023, "dtype": "float32"},
         "loading weights: 1023 B, float32"),
        ("loading", {"weights_bytes": 0, "dtype": "float32"}, "making weights up"),
        ("engine_ready", {"restarts": 0}, "engine ready"),
        ("engine_ready", {"restarts": 2}, "engine ready again, restart 2"),
        (
            "loaded", {"kv_tokens": 65536, "dtype": "float32", "device": "cpu",
                       "attention": "torch", "seconds": 3.21},
            "KV memory of 65,536 tokens; float32 on cpu, attention torch; 3.2 s",
        ),
        ("prefixes_computed", {"count": 2, "tokens": 1200}, "prefixes computed: 2, 1,200 tokens"),
        ("listening", {"url": "http://a:1", "model": "m"}, "listening on http://a:1, model m"),
        ("addresses", {"page": "http://a/", "api": "http://a/v1"},
         "page http://a/, API http://a/v1"),
        ("try", {"command": "curl x"}, "try: curl x"),
        ("stopping", {"grace": 30.0}, "stopping: answers have 30 s to end"),
        ("stopped", {}, "stopped"),
        ("rerendered", {"id": "a", "key": None, "app": "support", "tokens": 83, "at": 3657,
                        "offset": 1, "kind": "generation_prompt"},
         "a conversation of support is written differently than before, 83 cached tokens could not "
         "be used: generation prompt differs 1 tokens into an answer, at token 3657 of the prompt "
         "(told once)"),
        ("job_started", {"job": "batch_1", "key": None}, "job started: job batch_1"),
        ("engine_down", {"error": "it died"}, "engine down: error it died"),
    ],
)  # fmt: skip
def test_lines(event, fields, line):
    assert line_of(event, fields) == line


@pytest.fixture
def logs():
    """The logs as they were, afterwards."""
    root, own = logging.getLogger(), logging.getLogger("onestem")
    before = root.handlers[:], root.level, own.level
    yield
    root.handlers[:], root.level, own.level = before


def test_text_logs(logs, capsys):
    set_up("info", "text")
    log.debug("unseen")
    log.info("refused", **REFUSED)
    log.error("engine_stuck", error="silent")
    try:
        raise ValueError("odd")
    except ValueError as error:
        log.exception("internal_error", error, path="/x")
    logging.getLogger("uvicorn.error").warning("request of %s", "somebody")
    lines = capsys.readouterr().err.splitlines()
    stamped = [line for line in lines if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line)]
    assert [line[20:] for line in stamped] == [
        "POST /v1/completions 400: invalid_request, n",
        "error: engine stuck: error silent",
        "error: internal error: path /x",
        "warning: request of somebody",
    ]
    assert lines[-2:] == ["ValueError: odd", stamped[-1]]


@pytest.mark.parametrize(("terminal", "style"), [(True, "text"), (False, "json")])
def test_text_is_for_terminals(monkeypatch, terminal, style):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert default_format() == style

"""Every field that is not honoured is refused by name, in OpenAI's error object."""

from __future__ import annotations

import json
import socket

import pytest

from onestem.options import parse_memory
from onestem.server.api import limits

PML = '<prompt schema="nobody">Hello</prompt>'
JSON = {"Content-Type": "application/json"}
USER = [{"role": "user", "content": "hi"}]

# (endpoint, field, value): each alone, beside what the endpoint needs.
BAD = [
    *[("chat/completions", name, value) for name, value in [
        ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("functions", [{}]),
        ("audio", {}), ("modalities", ["audio"]), ("reasoning_effort", "low"),
        ("prediction", {}), ("web_search_options", {}),
        ("top_logprobs", 2), ("messages", []), ("messages", [{"role": "tool", "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
        ("messages", [{"role": "user"}]), ("messages", "hi"), ("logprobs", 3),
        ("documents", 3), ("documents", [5]), ("documents", [""]), ("repair", 0.5), ("repair", 2),
        ("lead_in", "a"), ("lead_in", ""),
    ]],
    *[("completions", name, value) for name, value in [
        ("echo", 3), ("best_of", 2), ("suffix", "x"), ("logprobs", True), ("logprobs", -1),
        ("prompt", []), ("prompt", ["a", 3]), ("prompt", [[1], "a"]), ("prompt", [1, True]),
        ("prompt", {}), ("prompt", [2560]), ("prompt", [-1]), ("prompt", ["a"] * 257),
        ("prompt", [["a"]]), ("prompt", [[[1]]]), ("prompt", [[1], ["a"]]),
        ("prompt", [[]]), ("max_completion_tokens", 3), ("messages", USER),
        ("documents", ["a"]), ("repair", 0.5), ("lead_in", "a"),
    ]],
    *[(endpoint, name, value) for endpoint in ("chat/completions", "completions")
      for name, value in [
        ("n", 0), ("n", 1.5), ("n", 5000), ("max_tokens", 0), ("temperature", -1),
        ("temperature", "hot"), ("top_p", 0), ("top_p", 2), ("presence_penalty", 3),
        ("frequency_penalty", -3), ("logit_bias", {"x": 1}), ("logit_bias", {"1": 101}),
        ("logit_bias", {"99999": 1}), ("seed", 1.5), ("seed", 2**64), ("stop", ""), ("stop", [1]),
        ("stream", "yes"), ("stream_options", {"include_usage": True}), ("timeout", 0),
        ("timeout", 1e-9), ("timeout", True), ("timeout", 1e9),
        ("cache_salt", ""), ("cache_salt", "x" * 300),
        ("prefix", 3), ("response_format", {"type": "grammar"}), ("response_format", "json"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}),
        ("temperatur", 1), ("user", 3), ("metadata", []), ("min_tokens", 99),
        ("stop_token_ids", [99999]), ("model", 3), ("pml", "text"), ("pml", 3),
        ("isolation", "off"),
    ]],
]  # fmt: skip


def ask(http, endpoint, **changes):
    needed = {"messages": USER} if endpoint == "chat/completions" else {"prompt": "hi"}
    return http.post(f"/v1/{endpoint}", json={**needed, "max_tokens": 4, **changes})


@pytest.mark.parametrize(("endpoint", "name", "value"), BAD, ids=lambda value: str(value)[:40])
def test_a_field_that_is_not_honoured_is_refused_by_name(embedded, endpoint, name, value):
    with embedded.http() as http:
        answer = ask(http, endpoint, **{name: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"].startswith("req-")
    assert name in error["message"] or name == error["param"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"01": 1, "1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2560]}, "stop_token_ids"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2560]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"pml": "<prompt/>"}, "pml"),
    ],
)
def test_param_names_the_field_at_fault(embedded, changes, param):
    with embedded.http() as http:
        answer = ask(http, "completions", **changes)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("chat/completions", {"messages": USER, "max_completion_tokens": 0},
         "max_completion_tokens"),
        ("chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 10**6},
         "top_logprobs"),
        ("chat/completions", {"messages": [{**USER[0], "content": "x " * 9000}]}, "messages"),
        ("chat/completions", {"messages": [{**USER[0], "wrong": 1}]}, "messages"),
        ("completions", {"prompt": "a", "guided_json": {"not": {}}}, "guided_json"),
        ("completions", {"prompt": "a", "structured_outputs": {"json": {"not": {}}}},
         "structured_outputs"),
        ("completions", {"prompt": "a", "min_tokens": 2, "stop_token_ids": [1], "max_tokens": 1},
         "min_tokens"),
        ("completions", {"prompt": "a", "logprobs": 1, "echo": True, "prefix": "x"}, "echo"),
        ("completions", {"max_tokens": 3}, None),
        ("completions", {"pml": "<prompt"}, None),
        ("score", {"text": [-1]}, "text"),
        ("score", {"prompt": "a", "completions": [[]]}, "completions"),
    ],
)  # fmt: skip
def test_param_is_a_field_of_the_body_or_null(embedded, endpoint, body, param):
    with embedded.http() as http:
        answer = http.post(f"/v1/{endpoint}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param, answer.text


def test_unknown_names_are_404(embedded):
    with embedded.http() as http:
        for answer, code in (
            (ask(http, "completions", model="gpt-9"), "model_not_found"),
            (ask(http, "completions", prefix="nobody"), "prefix_not_found"),
            (http.get("/v1/prefixes/nobody"), "prefix_not_found"),
            (http.get("/v1/schemas/nobody"), "schema_not_found"),
            (http.post("/v1/completions", json={"pml": PML}), "schema_not_found"),
            (http.get("/v1/files/file-1"), "not_found"),
            (http.get("/v1/batches/batch_1"), "not_found"),
            (http.get("/v1/nothing"), None),
        ):
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == code


def test_routes_of_vllm_are_told_the_way_out(embedded):
    with embedded.http() as http:
        for path in ("/v1/embeddings", "/pooling"):
            answer = http.post(path, json={})
            assert answer.status_code == 404
            assert f"there is no POST {path} (vLLM's): " in answer.json()["error"]["message"]


def test_wrong_methods_are_405(embedded):
    with embedded.http() as http:
        answer = http.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert "GET /v1/completions" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"\xff", b'{"prompt": "a", "prompt": "b"}', b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}",
    ],
    ids=range(9),
)  # fmt: skip
def test_bodies_that_are_no_json_object(embedded, body):
    with embedded.http() as http:
        answer = http.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("depth", [65, 300, 5000])
def test_bodies_that_nest_too_deeply(embedded, depth):
    body = b'{"prompt": "A", "metadata": ' + b'{"a":' * (depth - 1) + b"1" + b"}" * depth
    with embedded.http() as http:
        answer = http.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"
    assert "limit is 64" in answer.json()["error"]["message"]


def test_a_body_as_deep_as_allowed(embedded):
    deep = b'{"prompt": "A", "max_tokens": 1, "metadata": ' + b'{"a":' * 63 + b"1" + b"}" * 64
    with embedded.http() as http:
        assert http.post("/v1/completions", content=deep, headers=JSON).status_code == 200


def test_a_prompt_that_is_too_long(embedded):
    with embedded.http() as http:
        limit = embedded.service.client.facts.max_model_len
        answer = ask(http, "completions", prompt=[5] * limit)
    assert answer.status_code == 400
    assert f"limit is {limit - 1}" in answer.json()["error"]["message"]


def test_a_body_that_is_too_long(embedded):
    limit = parse_memory(embedded.settings.max_body)
    with embedded.http() as http:
        declared = http.post("/v1/completions", content=b" " * (limit + 1), headers=JSON)
        chunked = http.post("/v1/completions", content=iter([b" " * (1 << 20)] * 9), headers=JSON)
    for answer in (declared, chunked):
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


def test_a_body_that_does_not_come(embedded, monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.05)
    host, port = embedded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        connection.settimeout(30)
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_stream_is_refused_before_it_begins(embedded):
    schema = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
    with embedded.http() as http:
        answer = ask(http, "completions", stream=True, response_format=schema)
    assert answer.status_code == 400
    assert json.loads(answer.text)["error"]["param"] == "response_format"

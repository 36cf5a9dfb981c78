"""The OpenAPI document is what the server does; no body of any kind makes it fail, hang or leak."""

from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from onestem.adapters.messages_read import MessagesBody
from onestem.adapters.responses_read import ResponsesBody
from onestem.openai.schema import ChatBody, CompletionBody
from tests.server.harness import running
from tests.soak import soaked

# A schema cannot say which of all good bodies fit a model's length, or name a file that is there.
CHECKED = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
)
JSON = {"Content-Type": "application/json"}
SECONDS = 5.0  # that the server gives an answer
BOUNDED = settings(
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_model):
    with running(
        tmp_path_factory.mktemp("fuzz"),
        model=tiny_model,
        served_model_name=["tiny"],
        timeout=SECONDS,
    ) as server:
        yield server
        server.check()


@pytest.fixture(scope="module")
def http(server):
    with server.http() as client:
        yield client


def operations(server) -> list:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return [result.ok() for result in document.get_all_operations()]


def test_the_document_has_every_route(server):
    labels = {operation.label for operation in operations(server)}
    assert {"POST /v1/chat/completions", "POST /v1/completions", "POST /v1/batches"} <= labels
    assert {"POST /v1/messages", "POST /v1/messages/count_tokens", "POST /v1/responses"} <= labels
    assert len(labels) == 33


def bound(body: dict, path: str) -> None:
    """Let answers end soon: without a limit one is as long as a slow machine's deadline."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int | float) and body[name] > 3:
            body[name] = 3
    if type(body.get("timeout")) in (int, float) and 0 < body["timeout"] < SECONDS:
        body["timeout"] = SECONDS  # else the answer may be a 504, as it should be
    name = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_tokens"}.get(path)
    if name is not None and body.get(name) is None and body.get("max_completion_tokens") is None:
        body[name] = 3


@pytest.mark.parametrize("examples", [4, soaked(12)])
def test_the_server_does_what_the_document_says(server, examples):
    for operation in operations(server):

        @settings(BOUNDED, max_examples=examples)
        @given(case=operation.as_strategy() | operation.as_strategy(GenerationMode.NEGATIVE))
        def check(case):
            if isinstance(case.body, dict):
                bound(case.body, case.path)
            case.call_and_validate(base_url=server.url, checks=CHECKED, timeout=30)

        check()


scalars = st.none() | st.booleans() | st.integers(-5, 3000) | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
names = sorted({*CompletionBody.model_fields, *ChatBody.model_fields})
bodies = st.dictionaries(st.sampled_from(names) | st.text(max_size=8), values, max_size=5)


@settings(BOUNDED, max_examples=100)
@given(body=bodies, chat=st.booleans())
def test_fuzzed_bodies(http, body, chat):
    """No 500, no hang."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    needed = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": [5, 6]}
    raw = json.dumps({**needed, "max_tokens": 2, **body})
    answer = http.post(path, content=raw.encode("utf-8", "surrogatepass"), headers=JSON)
    assert answer.status_code in (200, 400, 404, 501, 504)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


# Conversations of other APIs: what their own bodies have, much of it in the wrong place.
kinds = ["text", "thinking", "tool_use", "tool_result", "image", "message", "function_call",
         "function_call_output", "reasoning", "input_text", "output_text", "function", "custom",
         "auto", "any", "tool", "none", "json_schema"]  # fmt: skip
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(kinds)},
    optional={
        **dict.fromkeys(["text", "thinking", "id", "name", "call_id", "tool_use_id", "arguments",
                         "signature"], st.text(max_size=4)),
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]),
        "input": st.dictionaries(st.text(max_size=3), values, max_size=2),
        **dict.fromkeys(["content", "output", "summary"], st.text(max_size=4) | st.lists(
            st.fixed_dictionaries({"type": st.sampled_from(kinds), "text": st.text(max_size=4)}),
            max_size=2)),
        **dict.fromkeys(["input_schema", "parameters", "schema", "citations"], values),
        "cache_control": st.just({"type": "ephemeral"}),
    },
)  # fmt: skip
turns = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.text(max_size=4) | st.lists(parts, max_size=4),
    }
)
conversations = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(turns, max_size=4),
        "input": st.text(max_size=4) | st.lists(turns | parts, max_size=4),
        "system": st.text(max_size=4) | st.lists(parts, max_size=2),
        "tools": st.lists(parts, max_size=2),
        "tool_choice": parts | st.sampled_from(["auto", "none", "required"]),
        "text": st.fixed_dictionaries({"format": parts}),
        "stream": st.booleans(),
        "previous_response_id": st.text(max_size=4),
    },
)
others = st.dictionaries(
    st.sampled_from(sorted({*MessagesBody.model_fields, *ResponsesBody.model_fields})),
    values,
    max_size=3,
)


@settings(BOUNDED, max_examples=120)
@given(body=conversations, other=others, route=st.sampled_from(["messages", "responses"]))
def test_fuzzed_conversations(http, body, other, route):
    """No 5xx but a stream's deadline, and errors in the API's own form."""
    needed = {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    if route == "responses":
        needed = {"max_output_tokens": 2, "input": "a"}
    own = MessagesBody if route == "messages" else ResponsesBody
    given = {**needed, **{k: v for k, v in {**other, **body}.items() if k in own.model_fields}}
    raw = json.dumps(given).encode("utf-8", "surrogatepass")
    answer = http.post(f"/v1/{route}", content=raw, headers=JSON)
    assert answer.status_code in (200, 400, 404, 504)
    if answer.status_code == 200:
        stream = answer.headers["content-type"].startswith("text/event-stream")
        assert stream == (given.get("stream") is True)
        assert not stream or b"error" not in answer.content.split(b"\n")[0]
    elif route == "messages":
        assert set(answer.json()) == {"type", "error", "request_id"}
    else:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@settings(BOUNDED, max_examples=25)
@given(raw=st.binary(max_size=60), method=st.sampled_from(["POST", "PUT"]))
def test_fuzzed_bytes(http, raw, method):
    for path in ("/v1/completions", "/v1/prefixes/a", "/v1/batches", "/v1/files"):
        answer = http.request(method, path, content=raw, headers=JSON)
        assert answer.status_code in (400, 405, 415)

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

from onestem.openai.schema import ChatBody, CompletionBody
from tests.server.harness import running

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
BOUNDED = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_model):
    with running(
        tmp_path_factory.mktemp("fuzz"), model=tiny_model, served_model_name=["tiny"], timeout=5.0
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
    assert len(labels) == 27


def test_the_server_does_what_the_document_says(server):
    for operation in operations(server):

        @BOUNDED
        @given(case=operation.as_strategy() | operation.as_strategy(GenerationMode.NEGATIVE))
        def check(case):
            if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens"), int):
                case.body["max_tokens"] = min(case.body["max_tokens"], 3)
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


@settings(BOUNDED, max_examples=25)
@given(raw=st.binary(max_size=60), method=st.sampled_from(["POST", "PUT"]))
def test_fuzzed_bytes(http, raw, method):
    for path in ("/v1/completions", "/v1/prefixes/a", "/v1/batches", "/v1/files"):
        answer = http.request(method, path, content=raw, headers=JSON)
        assert answer.status_code in (400, 405, 415)

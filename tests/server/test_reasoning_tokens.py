"""How many tokens of its answers a call's `usage` says are reasoning."""

from __future__ import annotations

import json

import pytest

from tests.engine.tiny_tokenizers import LLAMA_3_TEMPLATE, make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny
from tests.server.harness import running
from tests.server.test_batches import create, ended

MARKS = ["<think>", "</think>"]
TEMPLATE = LLAMA_3_TEMPLATE + "{# <think> </think> #}"
ASK = [{"role": "user", "content": "Warm?"}]
ANSWER = {
    "messages": ASK,
    "guided_regex": "<think>\\n[Z]{3}\\n</think>\\n\\nZZ",
    "max_tokens": 40,
    "temperature": 0,
}


@pytest.fixture(scope="module", params=["", "<think>\n"], ids=["unopened", "opened"])
def server(request, tmp_path_factory):
    """A server of a tiny model, whose template may open reasoning."""
    root = tmp_path_factory.mktemp("thinks")
    path = make_tiny("llama", root / "m")
    template = TEMPLATE.replace("{% endif %}", request.param + "{% endif %}")
    make_byte_level_tokenizer(path, VOCAB_SIZE, template=template, more_names=MARKS)
    with running(root / "state", model=path, engine={"kv_memory": "8MiB"}) as server:
        server.opens = bool(request.param)
        yield server
        server.check()


@pytest.fixture
def http(server):
    with server.http() as made:
        yield made


def tokens_up_to(mark, ids, text):
    return next(count for count in range(len(ids)) if mark in text(ids[:count]))


def usage_of_stream(http, path, body):
    options = {"stream_options": {"include_usage": True}} if "chat" in path else {}
    answer = http.post(path, json={**body, "stream": True, **options})
    assert answer.status_code == 200, answer.text
    *_, last = (line for line in answer.text.splitlines() if line.startswith("data: {"))
    event = json.loads(last.removeprefix("data: "))
    return event.get("response", event)["usage"]


def test_whole_streamed_and_in_a_batch(server, http):
    """An answer of a format begins where the prompt ends, which opens no reasoning of it. It has
    the format where the marks of reasoning are control tokens, too."""
    path = "/v1/chat/completions"
    for n in (1, 2):
        body = {**ANSWER, "n": n, "return_token_ids": True}
        whole = http.post(path, json=body).json()
        for choice in whole["choices"]:
            assert choice["message"]["reasoning"] == "ZZZ"
            assert choice["message"]["content"] == "ZZ"
        each = [choice["token_ids"] for choice in whole["choices"]]
        wanted = sum(tokens_up_to("</think>", ids, server.service.model.text) for ids in each)
        assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": wanted}
        streamed = usage_of_stream(http, path, body)
        for name in ("completion_tokens", "completion_tokens_details"):
            assert streamed[name] == whole["usage"][name]
        line = {"custom_id": "a", "method": "POST", "url": path, "body": {**ANSWER, "n": n}}
        batch = ended(http, create(http, json.dumps(line).encode(), endpoint=path)["id"])
        told = http.get(f"/v1/files/{batch['output_file_id']}/content").json()
        usage = told["response"]["body"]["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": wanted}


def test_reasoning_that_does_not_end(server, http):
    """Only where the prompt opens it is what this model writes reasoning."""
    body = {
        "max_tokens": 9,
        "temperature": 0,
        "logit_bias": {str(server.service.model.tokenizer.control_token("<think>")): -100},
    }
    chat = {**body, "messages": ASK}
    response = {"input": ASK, "max_output_tokens": 9, "temperature": 0}
    made = http.post("/v1/chat/completions", json=chat).json()["usage"]
    counts = (made["completion_tokens"], made["completion_tokens_details"]["reasoning_tokens"])
    assert counts == (9, 9 * server.opens)
    streamed = usage_of_stream(http, "/v1/chat/completions", chat)
    assert streamed["completion_tokens_details"] == made["completion_tokens_details"]
    for usage in (
        http.post("/v1/responses", json=response).json()["usage"],
        usage_of_stream(http, "/v1/responses", response),
    ):
        assert usage["output_tokens"] == 9
        assert usage["output_tokens_details"] == {"reasoning_tokens": 9 * server.opens}

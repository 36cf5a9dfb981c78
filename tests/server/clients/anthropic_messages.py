"""Anthropic's own client."""

from __future__ import annotations

import anthropic
import pytest

from tests.server.clients.asked import BRIEF, URL, USER, Answer

ASKED = {
    "model": "embedded", "max_tokens": 80, "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": USER}],
    "system": [{"type": "text", "text": BRIEF, "cache_control": {"type": "ephemeral"}}],
}  # fmt: skip
TOOLS = {
    "tools": [{"name": "f", "input_schema": Answer.model_json_schema()}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


@pytest.fixture(scope="module")
def client():
    return anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)


def streamed(client, **asked):
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


def shown(message):
    blocks = [{**block.model_dump(), "id": None} for block in message.content]
    return [*blocks, message.stop_reason, message.usage.output_tokens]


def test_texts_whole_streamed_and_beta(client):
    whole, beta = client.messages.create(**ASKED), client.beta.messages.create(**ASKED)
    assert shown(whole) == shown(streamed(client, **ASKED)) == shown(beta)
    assert whole.content[0].text


def test_a_tool_is_called_and_its_result_is_answered(client):
    asked = {**ASKED, **TOOLS}
    whole, beta = client.messages.create(**asked), client.beta.messages.create(**asked)
    pieces = streamed(client, **asked)
    assert shown(whole) == shown(pieces) == shown(beta)
    assert whole.stop_reason == "tool_use"
    (block,) = pieces.content
    assert set(block.input) == {"yes", "city"}
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "right"}
    turns = [*ASKED["messages"], pieces.to_param(), {"role": "user", "content": [result]}]
    then = client.messages.create(**{**ASKED, "messages": turns})
    assert then.usage.cache_read_input_tokens > 10
    assert then.content[0].text


def test_usage(client):
    given = {name: ASKED[name] for name in ("model", "messages", "system")}
    counted = client.messages.count_tokens(**given).input_tokens
    client.messages.create(**ASKED)
    usage = client.messages.create(**ASKED).usage
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    assert (read, written) == (counted - 1, 1)


@pytest.mark.parametrize(
    ("changes", "error", "kind"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "invalid_request_error",
        ),
    ],
)
def test_errors(client, changes, error, kind):
    with pytest.raises(error) as caught:
        client.messages.create(**{**ASKED, **changes})
    assert caught.value.body["error"]["type"] == kind
    assert caught.value.request_id.startswith("req-")

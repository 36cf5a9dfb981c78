"""OpenAI's own client, on responses."""

from __future__ import annotations

import openai
import pytest

from tests.server.clients.asked import BRIEF, URL, USER, Answer

ASKED = {
    "model": "embedded", "input": USER, "max_output_tokens": 80, "temperature": 0,
    "instructions": BRIEF,
}  # fmt: skip
TOOLS = {
    "tools": [{"type": "function", "name": "f", "parameters": Answer.model_json_schema(),
               "strict": True}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def client():
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def streamed(client, **asked):
    """The response, and the types of its events, each once."""
    with client.responses.stream(**asked) as stream:
        types = list(dict.fromkeys(event.type for event in stream))
        return stream.get_final_response(), types


def calls_of(response):
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


def test_texts_whole_and_streamed(client):
    whole = client.responses.create(**ASKED)
    pieces, types = streamed(client, **ASKED)
    assert whole.output_text == pieces.output_text != ""
    assert whole.status == pieces.status
    assert types == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_tool_is_called_and_its_result_is_answered(client):
    whole = client.responses.create(**ASKED, **TOOLS)
    pieces, types = streamed(client, **ASKED, **TOOLS)
    assert calls_of(whole) == calls_of(pieces)
    assert calls_of(whole)[0][0] == "f"
    assert types == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "right"}
        for item in whole.output
    ]
    items = [{"role": "user", "content": USER}, *whole.output, *results]
    same = {"model": "embedded", "instructions": BRIEF, "temperature": 0.0, **TOOLS,
            "max_output_tokens": 9, "tool_choice": "none"}  # fmt: skip
    stored = client.responses.create(input=results, previous_response_id=whole.id, **same)
    sent = client.responses.create(input=items, store=False, **same)
    assert stored.output_text == sent.output_text != ""
    assert stored.usage.input_tokens == sent.usage.input_tokens
    assert (stored.store, sent.store) == (True, False)
    assert sent.usage.input_tokens_details.cached_tokens == sent.usage.input_tokens - 1
    assert client.responses.retrieve(stored.id).output_text == stored.output_text
    client.responses.delete(stored.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(**ASKED, previous_response_id=stored.id)
    assert caught.value.param == "previous_response_id"


def test_an_object_as_the_text(client):
    parsed = client.responses.parse(
        model="embedded", input=USER, text_format=Answer, max_output_tokens=200, temperature=0.0
    )
    assert isinstance(parsed.output_parsed, Answer)


def test_other_tools_are_refused(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASKED, tools=[{"type": "web_search"}])
    assert caught.value.param == "tools"

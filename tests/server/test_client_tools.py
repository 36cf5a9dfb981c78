"""Agents' conversations through the openai client: roles, tools, streams, and what is sent back."""

from __future__ import annotations

import json

import openai
import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
HIGH = {
    "type": "function",
    "function": {
        "name": "height",
        "parameters": {
            "type": "object",
            "properties": {"tower": {"type": "string", "maxLength": 9}},
            "required": ["tower"],
        },
    },
}
ASK = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "name": "anna", "content": "Weather in Paris and Rome?"},
]
ASKED = {"model": "embedded", "tools": [WEATHER, HIGH], "max_tokens": 200, "temperature": 1.0}


@pytest.fixture(scope="module")
def client(embedded):
    with openai.OpenAI(base_url=f"{embedded.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def two_calls(client) -> int:
    """A seed for which the model makes several calls and ends."""
    for seed in range(40):
        made = client.chat.completions.create(
            **ASKED, messages=ASK, tool_choice="required", seed=seed
        )
        choice = made.choices[0]
        if choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 2:
            return seed
    raise AssertionError("no seed gives two calls")


def test_a_loop_of_tools_with_two_parallel_calls(client, two_calls):
    """The answer is sent back as the client dumps it, with results of both calls."""
    asked = {**ASKED, "seed": two_calls, "tool_choice": "required"}
    made = client.chat.completions.create(**asked, messages=ASK)
    message = made.choices[0].message
    assert message.content is None
    calls = message.tool_calls
    assert len({call.id for call in calls}) == 2
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert call.type == "function"
        assert list(arguments) == [{"get_weather": "city", "height": "tower"}[call.function.name]]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in calls]
    of_litellm = {**message.model_dump(), "provider_specific_fields": {"refusal": None}}
    for dumped in (message, of_litellm, message.model_dump(exclude_none=True)):
        then = client.chat.completions.create(
            **ASKED, messages=[*ASK, dumped, *results], tool_choice="none", seed=1
        )
        assert then.choices[0].message.tool_calls is None
        assert then.choices[0].message.content
        cached = then.usage.prompt_tokens_details.cached_tokens
        assert cached >= made.usage.prompt_tokens - 8  # what was asked before is not computed again


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_of_calls_is_the_whole_answer(client, two_calls, n):
    asked = {**ASKED, "messages": ASK, "tool_choice": "required", "seed": two_calls, "n": n}
    whole = client.chat.completions.create(**asked)
    found: dict[int, dict[int, list[str]]] = {index: {} for index in range(n)}
    reasons = {}
    pieces = 0
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            assert not choice.delta.content
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    found[choice.index][call.index] = [call.id, call.function.name, ""]
                found[choice.index][call.index][2] += call.function.arguments
                pieces += 1
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        calls = choice.message.tool_calls
        kept = [[call.id[:5], call.function.name, call.function.arguments] for call in calls]
        streamed = [[name[:5], *rest] for name, *rest in found[choice.index].values()]
        assert streamed == kept
        assert reasons[choice.index] == choice.finish_reason
    assert pieces > 4 * n  # arguments come as they are sampled


def test_the_client_reads_streamed_calls(client):
    with client.chat.completions.stream(
        **ASKED,
        messages=ASK,
        tool_choice={"type": "function", "function": {"name": "height"}},
        seed=3,
    ) as stream:
        stream.until_done()
        made = stream.get_final_completion()
    (call,) = made.choices[0].message.tool_calls
    assert call.function.name == "height"
    if made.choices[0].finish_reason == "tool_calls":
        assert set(json.loads(call.function.arguments)) == {"tower"}


def test_labels_change_nothing(client):
    plain = {"model": "embedded", "messages": ASK, "temperature": 0, "max_tokens": 5}
    labels = {
        "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me",
        "prompt_cache_key": "k", "safety_identifier": "s", "modalities": ["text"],
        "parallel_tool_calls": True,
    }  # fmt: skip
    expected = client.chat.completions.create(**plain).choices[0].message.content
    assert client.chat.completions.create(**plain, **labels).choices[0].message.content == expected


def test_names_of_vllm_over_http(client):
    asked = {"model": "embedded", "messages": ASK, "max_tokens": 40, "seed": 2}
    for extra, fits in (
        ({"guided_choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"guided_regex": "[ab]{4}"}, lambda text: len(text) == 4 and set(text) <= set("ab")),
        ({"guided_json": {"type": "boolean"}}, lambda text: text in ("true", "false")),
        ({"guided_grammar": 'root ::= "x"'}, lambda text: text == "x"),
        ({"structured_outputs": {"choice": ["up"]}}, lambda text: text == "up"),
        ({"chat_template_kwargs": {"enable_thinking": False}, "min_p": 0.1}, bool),
        ({"allowed_token_ids": [70, 71], "min_tokens": 2}, lambda text: len(text) >= 2),
    ):
        made = client.chat.completions.create(**asked, extra_body=extra)
        assert fits(made.choices[0].message.content), extra


def test_a_grammar_that_costs_too_much_is_a_400(client):
    asked = {"model": "embedded", "messages": ASK, "max_tokens": 4}
    costly = 'root ::= a a a a a a\na ::= b b b b b b | ""\nb ::= c c c c c c | ""\nc ::= [^x] | ""'
    with pytest.raises(openai.BadRequestError, match=r"grammar takes .*: simplify it") as caught:
        client.chat.completions.create(**asked, extra_body={"guided_grammar": costly})
    assert "\n" not in caught.value.body["message"]
    made = client.chat.completions.create(**asked, extra_body={"guided_regex": "[a-z]{1,500}"})
    assert set(made.choices[0].message.content) <= set("abcdefghijklmnopqrstuvwxyz")


def test_going_on_from_the_last_message(client):
    messages = [*ASK, {"role": "assistant", "content": "The weather is"}]
    made = client.chat.completions.create(
        model="embedded", messages=messages, max_tokens=3, temperature=0,
        extra_body={"continue_final_message": True, "return_token_ids": True},
    )  # fmt: skip
    assert made.choices[0].message.content is not None
    shorter = client.chat.completions.create(
        model="embedded", messages=messages, max_tokens=3, temperature=0,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert made.prompt_token_ids != shorter.prompt_token_ids
    assert shorter.prompt_token_ids[: len(made.prompt_token_ids)] == made.prompt_token_ids


def test_a_batch_of_tools(client):
    line = {
        "custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
        "body": {**ASKED, "messages": ASK, "tool_choice": "required", "parallel_tool_calls": False},
    }  # fmt: skip
    lines = [{**line, "custom_id": f"{i}", "body": {**line["body"], "seed": i}} for i in range(4)]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed"):
        batch = client.batches.retrieve(batch.id)
    assert batch.request_counts.completed == 4
    for text in client.files.content(batch.output_file_id).text.splitlines():
        choice = json.loads(text)["response"]["body"]["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] in ("get_weather", "height")
        if choice["finish_reason"] == "tool_calls":
            json.loads(call["function"]["arguments"])


def test_tokens_there_and_back(embedded, client):
    with embedded.http() as http:
        text = "The tower of Oakham, 東京."
        made = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
        plain = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        assert http.post("/detokenize", json={"tokens": plain["tokens"]}).json() == {"prompt": text}
        chat = http.post("/tokenize", json={"messages": ASK, "tools": [WEATHER]}).json()
        asked = client.chat.completions.create(
            model="embedded", messages=ASK, tools=[WEATHER], max_tokens=1
        )
        assert chat["count"] == asked.usage.prompt_tokens
        for path, body, name in (
            ("/tokenize", {}, "exactly one of prompt and messages"),
            ("/tokenize", {"prompt": 3}, "prompt is 3"),
            ("/tokenize", {"prompt": "a", "wonder": 1}, "unknown field in body: 'wonder'"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0] is -1"),
            ("/detokenize", {"tokens": [1, 10**6]}, "tokens has token id 1000000, expected ids"),
            ("/detokenize", {}, "body has no tokens"),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 400
            assert name in answer.json()["error"]["message"]

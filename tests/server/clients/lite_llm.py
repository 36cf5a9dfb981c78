"""LiteLLM: OpenAI's and Anthropic's APIs, whole and streamed."""

from __future__ import annotations

import json
import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the web for one
import litellm
import pytest

from tests.server.clients.asked import BRIEF, KEEPS_TOOLS, THINKS, URL, USER, Answer

FUNCTION = {"name": "f", "description": "Tells.", "parameters": Answer.model_json_schema()}
TOOLS = [{"type": "function", "function": FUNCTION}]
ASKED = [{"role": "system", "content": BRIEF}, {"role": "user", "content": USER}]
OF = {"openai/embedded": f"{URL}/v1", "hosted_vllm/embedded": f"{URL}/v1",
      "anthropic/embedded": URL}  # fmt: skip
MODELS = pytest.mark.parametrize("model", OF)


def complete(model, **more):
    asked = {"api_base": OF.get(model), "api_key": "none", "max_tokens": 80, "temperature": 0,
             "messages": ASKED, "max_retries": 0}  # fmt: skip
    return litellm.completion(model, **{**asked, **more})


def streamed(model, **more):
    chunks = list(complete(model, **more, stream=True, stream_options={"include_usage": True}))
    made = litellm.stream_chunk_builder(chunks, messages=ASKED)
    # Put together, LiteLLM's chunks have lost why they ended.
    reasons = [one.finish_reason for chunk in chunks for one in chunk.choices if one.finish_reason]
    (made.choices[0].finish_reason,) = reasons
    return made


@MODELS
def test_texts_streamed_and_whole(model):
    whole, pieces = complete(model), streamed(model)
    assert whole.choices[0].message.content == pieces.choices[0].message.content != ""
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(whole.usage, name) == getattr(pieces.usage, name) > 0


@MODELS
def test_a_tool_is_called_and_its_result_is_answered(model):
    forced = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    found = [complete(model, **forced), streamed(model, **forced)]
    for made in found:
        choice = made.choices[0]
        (call,) = choice.message.tool_calls
        assert call.function.name == "f"
        assert set(json.loads(call.function.arguments)) == {"yes", "city"}
        assert choice.finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "right"}
        then = complete(
            model, tools=TOOLS, tool_choice="none", messages=[*ASKED, choice.message, result]
        )
        assert then.choices[0].message.content
        assert not then.choices[0].message.tool_calls
        read = then.usage.prompt_tokens_details.cached_tokens
        assert not KEEPS_TOOLS or read > 0.5 * made.usage.prompt_tokens
    whole, pieces = (made.choices[0].message.tool_calls[0].function for made in found)
    assert whole.arguments == pieces.arguments


@MODELS
def test_an_object_as_the_text(model):
    made = complete(model, response_format=Answer)
    assert Answer.model_validate_json(made.choices[0].message.content)


@pytest.mark.parametrize("stream", [False, True])
def test_responses(stream):
    tool = {"type": "function", **FUNCTION}
    made = litellm.responses(
        input=USER, model="openai/embedded", api_base=f"{URL}/v1", api_key="none", tools=[tool],
        tool_choice="required", max_output_tokens=80, stream=stream, parallel_tool_calls=False,
    )  # fmt: skip
    if stream:
        made = list(made)[-1].response
    assert made.status == "completed"
    (call,) = made.output
    assert (call.type, call.name) == ("function_call", "f")
    assert set(json.loads(call.arguments)) == {"yes", "city"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "right"}
    then = litellm.responses(
        input=[result], model="openai/embedded", api_base=f"{URL}/v1", api_key="none",
        previous_response_id=made.id, max_output_tokens=9,
    )  # fmt: skip
    assert then.output[0].content[0].text
    assert then.usage.input_tokens > 10


@pytest.mark.parametrize("model", ["openai/thinks", "anthropic/thinks"])
def test_reasoning(model):
    base = THINKS if model.startswith("anthropic") else f"{THINKS}/v1"
    whole, pieces = (ask(model, api_base=base) for ask in (complete, streamed))
    thought = whole.choices[0].message.reasoning_content
    assert thought
    assert pieces.choices[0].message.reasoning_content == thought

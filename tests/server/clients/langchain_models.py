"""LangChain's OpenAI class, over chats and responses, and its Anthropic class."""

from __future__ import annotations

from functools import reduce
from operator import add

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.server.clients.asked import CITIES, KEEPS_TOOLS, THINKS, URL, USER, Answer, is_warm

TOOL = tool(is_warm)
OPENAI = {"base_url": f"{URL}/v1", "api_key": "none", "model": "embedded", "temperature": 0,
          "max_tokens": 80, "max_retries": 0}  # fmt: skip
ANTHROPIC = {"base_url": URL, "api_key": "none", "model": "embedded", "temperature": 0,
             "max_tokens": 80, "max_retries": 0}  # fmt: skip


def of(api: str):
    if api == "messages":
        return ChatAnthropic(**ANTHROPIC)
    over = {"use_responses_api": api == "responses", "stream_usage": True}
    return ChatOpenAI(**OPENAI, **over)


def without_calls(api):
    """LangChain takes a name for that of a tool, for Anthropic."""
    choice = {"type": "none"} if api == "messages" else "none"
    return of(api).bind_tools([TOOL], tool_choice=choice)


APIS = pytest.mark.parametrize("api", ["chat", "responses", "messages"])


@APIS
def test_a_tool_is_called_and_its_result_is_answered(api):
    model = of(api)
    once = {"parallel_tool_calls": False}
    bound = model.bind_tools([TOOL], tool_choice="any", **once)
    asked = [HumanMessage(USER)]
    called = bound.invoke(asked)
    streamed = reduce(add, bound.stream(asked))
    for made in (called, streamed):
        (call,) = made.tool_calls
        assert call["name"] == "is_warm"
        assert call["args"]["city"] in CITIES
        assert made.usage_metadata["input_tokens"] > 10
        assert made.usage_metadata["output_tokens"] > 5
        assert not made.invalid_tool_calls
    assert called.tool_calls[0]["args"] == streamed.tool_calls[0]["args"]
    metadata = called.response_metadata
    ended = {"chat": ("finish_reason", "tool_calls"), "responses": ("status", "completed"),
             "messages": ("stop_reason", "tool_use")}  # fmt: skip
    name, reason = ended[api]
    assert metadata[name] == reason
    if api != "responses":  # LangChain keeps no status of a stream
        assert streamed.response_metadata[name] == reason
    for made in (called, streamed):  # as the answer came, and as it was put together
        (result,) = [TOOL.invoke(call) for call in made.tool_calls]
        assert isinstance(result, ToolMessage)
        then = without_calls(api).invoke([*asked, made, result])
        assert then.text
        assert not then.tool_calls
        read = then.usage_metadata["input_token_details"]["cache_read"]
        assert not KEEPS_TOOLS or read > called.usage_metadata["input_tokens"] - 8


@APIS
def test_texts_streamed_and_whole(api):
    model = of(api)
    whole = model.invoke(USER)
    streamed = reduce(add, model.stream(USER))
    assert whole.text == streamed.text != ""
    for name in ("input_tokens", "output_tokens"):
        assert whole.usage_metadata[name] == streamed.usage_metadata[name] > 1


@APIS
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(api, method):
    found = of(api).with_structured_output(Answer, method=method, include_raw=True).invoke(USER)
    assert found["parsing_error"] is None
    assert isinstance(found["parsed"], Answer)
    assert bool(found["raw"].tool_calls) == (method == "function_calling")


def test_a_conversation_of_stored_responses():
    model = of("responses")
    kept = ChatOpenAI(**OPENAI, use_responses_api=True, use_previous_response_id=True)
    first = model.invoke(USER)
    asked = [HumanMessage(USER), first, HumanMessage("And in Paris?")]
    sent, stored = model.invoke(asked), kept.invoke(asked)
    counts = [one.usage_metadata["input_tokens"] for one in (sent, stored)]
    assert counts[0] == counts[1] > first.usage_metadata["total_tokens"]


def test_thinking_is_sent_back():
    """A turn's thinking, as the server signed it, is in the next prompt."""
    model = ChatAnthropic(**{**ANTHROPIC, "base_url": THINKS, "model": "thinks"},
                          thinking={"type": "adaptive"})  # fmt: skip
    asked = [HumanMessage(USER)]
    first = model.invoke(asked)
    streamed = reduce(add, model.stream(asked))
    for made in (first, streamed):
        (block,) = [block for block in made.content if block["type"] == "thinking"]
        assert block["thinking"]
        assert block["signature"]
        then = model.invoke([*asked, made, HumanMessage("And in Paris?")])
        read = then.usage_metadata["input_token_details"]["cache_read"]
        assert read >= made.usage_metadata["total_tokens"] - 8


def test_thinking_of_others_is_read():
    """A turn with thinking and a call that another model has made."""
    model = without_calls("messages")
    thought = {"type": "thinking", "thinking": "Rome is asked for, so I look.", "signature": "x"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "is_warm", "input": {"city": "Rome"}}
    result = ToolMessage([{"type": "text", "text": "Rome is warm."}], tool_call_id="toolu_1")
    made = [
        model.invoke([HumanMessage(USER), AIMessage(content), result])
        for content in ([use], [thought, use])
    ]
    assert all(one.text for one in made)
    without, thinking = (one.usage_metadata["input_tokens"] for one in made)
    assert thinking > without + 5

"""Anthropic's messages: their prompts are those of chats, and their events are the whole answer."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onestem.adapters.messages_read import read_count, read_messages
from onestem.adapters.messages_write import Messages
from onestem.errors import RequestError
from onestem.openai.forms import GENERIC, Reading
from onestem.openai.forms.form import Reasoning
from onestem.openai.read import read_body
from onestem.openai.write import ResponseFormat
from onestem.request import CompletionOutput
from tests.adapters.conversations import CHAT, MESSAGES
from tests.adapters.events import events_of, folded_message

USER = {"role": "user", "content": "a"}
SMALL = {"max_tokens": 5, "messages": [USER]}


def prompt(**changes):
    return read_messages({**SMALL, **changes}).prompts[0]


def chat(**changes):
    return read_body("chat", {"messages": [USER], **changes}).prompts[0]


def test_an_agents_conversation_has_a_chats_prompt():
    asked, expected = read_messages(MESSAGES), read_body("chat", CHAT)
    assert asked.prompts == expected.prompts
    assert asked.tools == expected.tools
    assert asked.params == expected.params
    counted, model = read_count({name: MESSAGES[name] for name in ("messages", "system", "tools")})
    assert counted == expected.prompts[0]
    assert model is None


def test_hints_and_what_changes_with_each_request_do_not_reach_the_prompt():
    billing = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    system = [{"type": "text", "text": "You help."}]
    expected = prompt(system=system)
    assert expected == chat(messages=[{"role": "system", "content": "You help."}, USER])
    hint = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    for number in range(2):
        line = billing.format(number)
        assert prompt(system=[{"type": "text", "text": line}, *system]) == expected
        assert prompt(system=f"{line}\nYou help.") == expected
    assert prompt(system=line) == prompt()
    assert prompt(system=[{**system[0], **hint}], **hint) == expected
    assert prompt(**said("user", {"type": "text", "text": "a", **hint})) == prompt()
    late = [USER, {"role": "system", "content": f"{line}\nkept: it is no client's first line"}]
    assert prompt(messages=late) == chat(messages=late)


def test_a_time_that_no_cache_has_is_refused():
    """Others than Anthropic's; what is beside it in a hint is the client's."""
    part = {"type": "text", "text": "a"}
    for ttl in ("2h", 300):
        hint = {"cache_control": {"type": "ephemeral", "ttl": ttl}}
        for changes in (hint, {"system": [part | hint]}, said("user", part | hint)):
            with pytest.raises(RequestError, match=r"cache_control\.ttl is .*, expected 5m or 1h"):
                read_messages({**SMALL, **changes})
    for beside in ({"ttl": "5m"}, {"ttl": None}, {"scope": "global"}):
        assert read_messages({**SMALL, "cache_control": beside}).in_conversation


def test_hints_mark_a_conversation():
    hint = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "a"}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    for marked, changes in (
        (False, {}),
        (False, {"system": [part], "tools": [tool], **said("user", part)}),
        (False, {"system": [{**part, "cache_control": None}]}),
        (True, hint),
        (True, {"system": [part, part | hint]}),
        (True, {"tools": [tool | hint]}),
        (True, said("user", part | hint)),
    ):
        assert read_messages({**SMALL, **changes}).in_conversation == marked, changes
    of_chats = {"type": "function", "function": {"name": "f"}}
    for changes in (
        {"prompt_cache_key": "k"},
        {"tools": [of_chats | hint]},
        {"messages": [{"role": "user", "content": [part | hint]}]},
    ):
        plain = {"messages": [USER]}
        assert not read_body("chat", plain).in_conversation
        assert read_body("chat", {**plain, **changes}).in_conversation, changes
    assert read_body("completion", {"prompt": "a", "prompt_cache_key": "k"}).in_conversation


def test_the_answer_goes_on_from_a_last_text():
    begun = [USER, {"role": "assistant", "content": "It is"}]
    assert prompt(messages=begun) == chat(messages=begun, continue_final_message=True)
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    called = prompt(messages=[USER, {"role": "assistant", "content": [call]}])
    assert not called.template.continue_final_message


def test_thinking_and_effort_are_variables_of_the_template():
    made = prompt(thinking={"type": "disabled"}, output_config={"effort": "max"})
    assert made.template.fields == {"enable_thinking": False, "reasoning_effort": "xhigh"}
    asked = prompt(thinking={"type": "enabled", "budget_tokens": 1024})
    assert asked.template.fields == {"enable_thinking": True}
    assert prompt().template.fields == {}


def test_an_answers_format():
    schema = {"type": "object", "properties": {}}
    asked = read_messages(
        {**SMALL, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    )
    assert asked.params.response_format["json_schema"]["schema"] == schema


@pytest.mark.parametrize(
    ("choice", "mode", "parallel", "names"),
    [
        ({"type": "auto"}, "auto", True, ["f", "g"]),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False, ["f", "g"]),
        ({"type": "tool", "name": "g"}, "required", False, ["g"]),
        ({"type": "none"}, "none", True, ["f", "g"]),
    ],
)
def test_choices_of_tools(choice, mode, parallel, names):
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in "fg"]
    found = read_messages({**SMALL, "tools": tools, "tool_choice": choice}).tools
    assert (found.mode, found.parallel) == (mode, parallel)
    assert [tool["function"]["name"] for tool in found.allowed.values()] == names


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "c"}
EDIT = {"type": "clear_tool_uses_20250919"}


def said(role: str, *blocks: dict) -> dict:
    return {"messages": [{"role": role, "content": [*blocks]}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": None}, "body has no max_tokens"),
        ({"messages": []}, "messages is [], expected a list of at least one message"),
        (said("user", IMAGE), "messages[0].content[0]: type is 'image': not supported here"),
        (said("user", {**RESULT, "content": [IMAGE]}), "type is 'image'"),
        (said("user", {"type": "document"}), "type is 'document'"),
        (said("assistant", RESULT), "role assistant has a block of type tool_result"),
        (said("assistant", {"type": "redacted_thinking", "data": "x"}), "redacted_thinking"),
        ({"tools": [{"type": "web_search_20250305"}]}, "tools[0]: type is 'web_search_20250305'"),
        (
            {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]},
            "tools[0].defer_loading is True",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice of type tool has no name"),
        ({"context_management": {"edits": [EDIT]}}, "clear_tool_uses_20250919"),
        ({"speed": "fast"}, "speed is 'fast'"),
        ({"n": 2}, "unknown field in body: 'n'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"stop_sequences": [""]}, "stop_sequences[0] is ''"),
        ({"tools": [{"name": "f", "input_schema": {"type": "no"}}]}, "tools[0].input_schema is"),
    ],
)
def test_what_is_not_there_is_refused_by_name(changes, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        read_messages({**SMALL, **changes})


USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 7,
    "total_tokens": 37,
    "prompt_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 10},
    "completion_tokens_details": {"reasoning_tokens": 4},
}
FORM = ResponseFormat(
    kind="chat",
    model="m",
    logprobs=None,
    return_token_ids=False,
    token_bytes=None,
    reading=Reading(form=replace(GENERIC, reasoning=Reasoning.tagged())),
)
TEXT = (
    "<think>\nTwo cities?\n</think>\n\nLet me see. "
    '<tool_call>\n{"name": "f", "arguments": {"a": "é\\n", "b": [1.5, null]}}\n'
    '</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call> Done. '
)


def writer(max_tokens: int = 7):
    return Messages(max_tokens).writer("msg_1", 0, FORM, lambda: USAGE)


def piece(text: str, finish_reason: str | None = None, stop_reason=None) -> CompletionOutput:
    return CompletionOutput(
        index=0, text=text, token_ids=[1], finish_reason=finish_reason, stop_reason=stop_reason
    )


def whole(text: str, finish_reason: str = "stop", stop_reason=None, max_tokens: int = 7) -> dict:
    return writer(max_tokens).whole(piece(text, finish_reason, stop_reason), USAGE)


@given(
    cuts=st.lists(st.integers(1, len(TEXT) - 1), max_size=12, unique=True),
    length=st.integers(0, len(TEXT)),
    ended=st.sampled_from(["stop", "length"]),
    singly=st.booleans(),
)
def test_the_events_are_the_whole_message(cuts, length, ended, singly):
    """Wherever the text is cut, and whichever part of it comes at a time."""
    text, written, raw = TEXT[:length], writer(), b""
    places = [0, *sorted(cut for cut in cuts if cut < length), length]
    for start, end in itertools.pairwise(places):
        last = ended if end == length else None
        if singly and start and last is None:
            raw += written.token(1, text[start:end])
        else:
            raw += written.events({(0, 0): piece(text[start:end], last)})
    raw += written.usage(USAGE)
    assert folded_message(events_of(raw)) == whole(text, ended)


def test_a_message_with_calls():
    made = whole(TEXT)
    thought, text, first, second, end = made["content"]
    assert thought == {"type": "thinking", "thinking": "Two cities?", "signature": "msg_1"}
    assert (text["text"], end["text"]) == ("Let me see.", " Done. ")
    assert (first["name"], first["input"]) == ("f", {"a": "é\n", "b": [1.5, None]})
    assert (second["name"], second["input"]) == ("g", {})
    assert first["id"] != second["id"]
    assert made["stop_reason"] == "tool_use"
    assert made["usage"] == {
        "input_tokens": 0,
        "cache_creation_input_tokens": 10,
        "cache_read_input_tokens": 20,
        "output_tokens": 7,
    }
    sent_back = prompt(messages=[USER, {"role": "assistant", "content": made["content"]}, USER])
    _, called, then, _ = sent_back.messages
    assert (called["content"], called["reasoning_content"]) == ("Let me see.", "Two cities?")
    assert [call["function"]["name"] for call in called["tool_calls"]] == ["f", "g"]
    assert then == {"role": "assistant", "content": " Done. "}


def test_arguments_that_are_no_json_object_are_kept():
    call = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'
    cut = whole(call.format('{"a": [1, 2, {"b": "c')[:-14], "length")
    assert cut["content"][0]["input"] == {"a": [1, 2, {}]}
    for wild in ('{"a": 1e999}', '{"a": nonsense}'):
        (block,) = whole(call.format(wild))["content"]
        assert block["input"] == {"arguments": wild}
        json.dumps(block, allow_nan=False)


@pytest.mark.parametrize(
    ("ended", "stop", "max_tokens", "expected"),
    [
        ("stop", None, 7, ("end_turn", None)),
        ("stop", 17, 7, ("end_turn", None)),
        ("stop", "END", 7, ("stop_sequence", "END")),
        ("length", None, 7, ("max_tokens", None)),
        ("length", None, 8, ("model_context_window_exceeded", None)),
    ],
)
def test_why_a_message_ends(ended, stop, max_tokens, expected):
    made = whole("a", ended, stop, max_tokens)
    assert (made["stop_reason"], made["stop_sequence"]) == expected


def test_a_stream_that_fails_ends_with_its_error():
    (event,) = events_of(writer().failed(503, "the engine is down"))
    assert event["error"] == {"type": "overloaded_error", "message": "the engine is down"}

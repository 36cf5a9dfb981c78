"""OpenAI's responses: their prompts are those of chats, and their events are the whole answer."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onestem.adapters.responses_read import read_responses
from onestem.adapters.responses_write import Responses
from onestem.errors import RequestError
from onestem.openai.read import Asked, read_body
from onestem.server.errors import ApiError
from onestem.server.objects.responses import StoredResponses
from tests.adapters.conversations import CHAT, RESPONSES
from tests.adapters.events import events_of, folded_response
from tests.adapters.test_messages import FORM, TEXT, USAGE, piece

USER = {"role": "user", "content": "a"}


def read(stored: StoredResponses | None = None, key: str = "", **body) -> Asked:
    stored = stored or StoredResponses()
    return read_responses(
        {"input": "a", **body},
        recall=lambda name: stored.turn(key, name),
        keep=lambda made, **how: stored.add(key, made, **how),
    )


def chat(**changes):
    return read_body("chat", {"messages": [USER], **changes}).prompts[0]


def writer(asked: Asked | None = None, name: str = "resp_1"):
    dialect = Responses({}, None) if asked is None else asked.dialect
    return dialect.writer(name, 5, FORM, lambda: USAGE)


def answered(asked: Asked, text: str, name: str = "resp_1") -> dict:
    """The whole answer, which is stored."""
    return writer(asked, name).whole(piece(text, "stop"), USAGE)


def test_an_agents_conversation_has_a_chats_prompt():
    asked, expected = read(**RESPONSES), read_body("chat", CHAT)
    assert asked.prompts == expected.prompts
    assert asked.tools == expected.tools
    assert asked.params == expected.params


def test_instructions_are_a_system_message():
    assert read(instructions="You help.").prompts == [
        chat(messages=[{"role": "system", "content": "You help."}, USER])
    ]


def test_two_texts_in_succession_are_two_messages():
    turns = [USER, {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}]
    assert read(input=turns).prompts == [chat(messages=turns)]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
            {"name": "n", "schema": {"type": "object"}, "strict": True},
        ),
    ],
)
def test_an_answers_format(form, expected):
    made = read(text={"format": form}).params.response_format
    assert made.get("json_schema", made) == expected


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        ("required", "required", ["f", "g"]),
        ("none", "none", ["f", "g"]),
        ({"type": "function", "name": "g"}, "required", ["g"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            "auto",
            ["g"],
        ),
    ],
)
def test_choices_of_tools(choice, mode, names):
    tools = [{"type": "function", "name": name, "parameters": None} for name in "fg"]
    found = read(tools=tools, tool_choice=choice).tools
    assert found.mode == mode
    assert [tool["function"]["name"] for tool in found.allowed.values()] == names


IMAGE = {"type": "input_image", "image_url": "x"}
TOOL = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": None}, "body has no input"),
        ({"input": []}, "input is [], expected text or a list of at least one item"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "type is 'input_image'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: type is 'item_reference'"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "only encrypted_content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]: type is 'web_search'"),
        ({"background": True}, "background is True"),
        ({"conversation": "c"}, "conversation is 'c'"),
        ({"truncation": "auto"}, "truncation is 'auto'"),
        ({"include": ["file_search_call.results"]}, "include[0] is 'file_search_call.results'"),
        ({"top_logprobs": 3}, "top_logprobs is 3"),
        ({"text": {"verbosity": "low"}}, "text.verbosity is 'low'"),
        ({"n": 2}, "unknown field in body: 'n'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema is missing"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name is missing"),
        ({"tools": [{**TOOL, "parameters": {"type": "no"}}]}, "tools[0].parameters is"),
    ],
)
def test_what_is_not_there_is_refused_by_name(changes, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        read(**changes)


@given(
    cuts=st.lists(st.integers(1, len(TEXT) - 1), max_size=12, unique=True),
    length=st.integers(0, len(TEXT)),
    ended=st.sampled_from(["stop", "length"]),
)
def test_the_events_are_the_whole_response(cuts, length, ended):
    text, written, raw = TEXT[:length], writer(), b""
    places = [0, *sorted(cut for cut in cuts if cut < length), length]
    for start, end in itertools.pairwise(places):
        last = ended if end == length else None
        raw += written.events({(0, 0): piece(text[start:end], last)})
    raw += written.usage(USAGE)
    whole = writer().whole(piece(text, ended), USAGE)
    assert folded_response(events_of(raw)) == whole
    assert whole["status"] == ("incomplete" if ended == "length" else "completed")


def test_a_response_with_calls():
    asked = read(metadata={"a": "b"}, instructions="You help.")
    made = answered(asked, TEXT)
    kinds = [item["type"] for item in made["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message"]
    assert made["output"][0]["content"] == [{"type": "reasoning_text", "text": "Two cities?"}]
    assert made["output"][2]["arguments"] == '{"a": "é\\n", "b": [1.5, null]}'
    assert made["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 10},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 37,
    }
    assert (made["metadata"], made["instructions"]) == ({"a": "b"}, "You help.")


def test_a_stream_that_fails_ends_with_its_error():
    created, begun, failed = events_of(writer().failed(503, "the engine is down"))
    assert (created["type"], begun["type"]) == ("response.created", "response.in_progress")
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine is down"}


def test_a_later_request_goes_on_from_a_stored_answer():
    """As if the client had sent all of the conversation again."""
    stored, sent = StoredResponses(), [USER]
    name = None
    for number in range(4):
        asked = read(stored, input=sent[-1:], previous_response_id=name)
        assert asked.prompts == read(input=sent).prompts
        made = answered(asked, f"{number}: {TEXT}", name := f"resp_{number}")
        assert stored.find("", name) == made
        sent += [*made["output"], {"role": "user", "content": f"and {number}?"}]
    branch = read(stored, input="b", previous_response_id="resp_0")
    first = sent[: 1 + len(stored.find("", "resp_0")["output"])]
    assert branch.prompts == read(input=[*first, {"role": "user", "content": "b"}]).prompts


def test_an_answer_of_no_text_is_a_turn_too():
    stored = StoredResponses()
    made = answered(read(stored), "")
    assert [item["type"] for item in made["output"]] == ["message"]
    turns = [USER, {"role": "assistant", "content": ""}, USER]
    assert read(stored, previous_response_id="resp_1").prompts == [chat(messages=turns)]


def test_answers_that_are_not_stored():
    stored = StoredResponses()
    answered(read(stored, store=False), TEXT)
    answered(read(stored, "alice"), TEXT)
    for key, name in (("", "resp_1"), ("bob", "resp_1"), ("alice", "resp_2")):
        for ask in (stored.find, stored.turn, stored.delete):
            with pytest.raises(ApiError, match="there is no response") as error:
                ask(key, name)
            assert error.value.status == 404
    stored.delete("alice", "resp_1")
    with pytest.raises(ApiError, match="there is no response"):
        read(stored, "alice", previous_response_id="resp_1")


def test_the_least_recently_used_answers_make_room():
    stored = StoredResponses(most=3)
    for number in range(3):
        answered(read(stored), TEXT, f"resp_{number}")
    stored.turn("", "resp_0")
    answered(read(stored), TEXT, "resp_3")
    with pytest.raises(ApiError):
        stored.find("", "resp_1")
    for kept in ("resp_0", "resp_2", "resp_3"):
        stored.find("", kept)


def test_turns_stay_while_later_ones_need_them():
    """And are counted once; in the end nothing is counted."""
    stored, name = StoredResponses(), None
    for number in range(5):
        asked = read(stored, input=str(number), previous_response_id=name)
        answered(asked, "x" * 1000, name := f"resp_{number}")
    (shelf,) = stored._shelves.values()
    whole = shelf.num_bytes
    assert 5 * 1500 < whole < 5 * 3000
    for number in range(4):
        stored.delete("", f"resp_{number}")
    assert shelf.num_bytes == whole
    turn = stored.turn("", "resp_4")
    assert [item["content"] for item in turn.items()[::2]] == list("01234")
    late = read(stored, previous_response_id="resp_4")
    stored.delete("", "resp_4")
    assert shelf.num_bytes == 0
    answered(late, "x" * 1000, "resp_5")  # it was under way
    assert shelf.num_bytes > whole
    stored.delete("", "resp_5")
    assert shelf.num_bytes == 0


def test_bytes_are_bounded():
    stored = StoredResponses(most_bytes=10_000)
    for number in range(20):
        answered(read(stored), "x" * 1000, f"resp_{number}")
    (shelf,) = stored._shelves.values()
    assert 5_000 < shelf.num_bytes <= 10_000
    stored.find("", "resp_19")
    answered(read(stored), "x" * 10_000, "resp_20")
    assert shelf.num_bytes == 0  # it does not fit

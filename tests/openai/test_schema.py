"""Fields are declared once: what is said of one follows from its declaration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from onestem import SamplingParams
from onestem.errors import RequestError
from onestem.openai.read import read_body, read_line_body
from onestem.openai.schema import ChatBody, CompletionBody
from onestem.rawtext import RawText

PACKAGE = Path(__file__).parents[2] / "onestem"
# Fields that mean nothing outside the engine.
PURE = (
    "allowed_token_ids", "bad_words", "frequency_penalty", "ignore_eos",
    "include_stop_str_in_output", "logit_bias", "min_p", "min_tokens", "presence_penalty",
    "repetition_penalty", "stop_token_ids", "temperature", "top_k", "top_p",
)  # fmt: skip
PROMPT = {"prompt": "a"}


def files_with(pattern: str) -> set[str]:
    return {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(pattern, path.read_text())
    }


@pytest.mark.parametrize("name", PURE)
def test_a_sampling_field_is_declared_once(name) -> None:
    """The API's words, batches and the server do not name it: it goes through them."""
    found = files_with(rf"\b{name}\b")
    assert "request/params.py" in found
    if name in ("temperature", "top_p"):  # options of `serve`, for requests that have none
        found -= {"server/run.py", "server/settings.py"}
    assert not {path for path in found if path.startswith(("openai/", "batch/", "server/"))}
    assert name in ChatBody.model_fields
    assert name in CompletionBody.model_fields


@pytest.mark.parametrize("name", sorted(set(SamplingParams.model_fields) - {"logprobs"}))
def test_a_body_has_the_limits_of_the_parameters(name) -> None:
    def limits(model) -> object:
        schema = model.model_json_schema()["properties"][name]
        options = [one for one in schema.get("anyOf", [schema]) if one != {"type": "null"}]
        kept = ("type", "minimum", "maximum", "exclusiveMinimum", "items", "maxItems", "minLength")
        return [{key: one[key] for key in kept if key in one} for one in options]

    for body in (ChatBody, CompletionBody):
        assert limits(body) == limits(SamplingParams)


def test_every_field_has_its_help() -> None:
    for name, field in SamplingParams.model_fields.items():
        assert field.description, name


def test_numbers_of_other_libraries() -> None:
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), seed=np.uint8(3), stop_token_ids=[np.int32(4)]
    )
    assert (params.n, params.temperature, params.seed) == (2, 0.5, 3)
    assert params.stop_token_ids == (4,)
    assert {type(params.n), type(params.seed)} == {int}
    assert params.replace(n=1).seed == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', expected a number from 0 to 100"),
        ({"top_p": 0}, "top_p is 0, expected a number above 0 and at most 1"),
        ({"n": True}, "n is True, expected an integer from 1 to 4096"),
        ({"stop": ["a", 1]}, "stop[1] is 1, expected non-empty text"),
        ({"stop": ["a"] * 65}, "stop has 65 texts, limit is 64: give fewer"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1] is 101, expected a number from -100 to 100"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema is missing"),
        ({"wonder": 1}, "unknown field in body: 'wonder'"),
        ({"stream_options": {"include_usage": 3}, "stream": True},
         "stream_options.include_usage is 3, expected true or false"),
        ({"timeout": 0}, "timeout is 0, expected seconds from 0.001 to 86400"),
        ({"best_of": 3}, "best_of is 3: not supported here, leave it out (or 1); give n and "
         "logprobs, and take the most probable answer"),
        ({"guided_json": {}, "structured_outputs": {"regex": "a"}},
         "structured_outputs and guided_json: give one of them"),
    ],
)  # fmt: skip
def test_sentences(fields, message) -> None:
    with pytest.raises(RequestError) as caught:
        read_body("completion", {**PROMPT, **fields})
    assert str(caught.value) == message


def test_a_line_is_no_call() -> None:
    for fields in ({"stream": True}, {"prefix": "a"}, {"timeout": 3}, {"echo": True}):
        with pytest.raises(RequestError, match=r"not supported in a batch line, leave it out"):
            read_line_body("completion", {**PROMPT, **fields})
    assert read_line_body("completion", {**PROMPT, "stream": False}).prompts[0].raw == RawText("a")


def test_json_inside_texts_is_bounded_too() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    for fields in ({"guided_json": deep}, {"structured_outputs": {"structural_tag": deep}}):
        with pytest.raises(RequestError, match="is no JSON"):
            read_body("completion", {**PROMPT, **fields})
    nested = '{"a":' + "[" * 900 + "]" * 900 + "}"
    with pytest.raises(RequestError, match="nests too deeply, limit is 64"):
        read_body("completion", {**PROMPT, "guided_json": nested})
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": nested}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    (prompt,) = read_body("chat", {"messages": messages}).prompts
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == nested


def test_templates_read_a_message_in_one_order() -> None:
    """Some write it as JSON, so its prompt depends on the order of its fields."""
    call = {"index": 0, "function": {"name": "f", "arguments": "{}"}, "id": "a"}
    asked = {"tool_calls": [call], "reasoning_content": "r", "role": "assistant"}
    answered = {"content": "2", "tool_call_id": "a", "name": "f", "role": "tool"}
    first = {"content": "b", "tool_calls": [], "role": "assistant"}
    messages = [{"role": "user", "content": "a"}, first, asked, answered]
    (prompt,) = read_body("chat", {"messages": messages}).prompts
    plain = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert json.dumps(prompt.messages[1:]) == json.dumps(
        [
            {"role": "assistant", "content": "b"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "r",
                "tool_calls": [plain],
            },
            {"role": "tool", "content": "2", "name": "f", "tool_call_id": "a"},
        ]
    )


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1, "a": 2}'])
def test_json_inside_texts_is_strict(text) -> None:
    """A field is refused; what a call had for arguments stays the text that it is."""
    with pytest.raises(RequestError, match=r"structured_outputs\.json is no JSON: "):
        read_body("completion", {**PROMPT, "guided_json": text})
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    (prompt,) = read_body("chat", {"messages": messages}).prompts
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == text


def test_a_prompt_in_pml_has_no_template() -> None:
    for fields in ({"tools": []}, {"chat_template_kwargs": {}}, {"continue_final_message": True}):
        with pytest.raises(RequestError, match="and pml: a prompt in PML has no chat template"):
            read_body("chat", {"pml": "<prompt schema='a'/>", **fields})

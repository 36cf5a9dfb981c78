"""What the run over BFCL finds wrong with an answer."""

from __future__ import annotations

import json

import pytest

from onestem_lab.serve.bfcl import Ask, Question
from onestem_lab.serve.bfcl_data import as_schema

PARAMETERS = {
    "type": "dict",
    "properties": {"a": {"type": "float"}, "type": {"type": "tuple", "items": {"type": "String"}}},
    "required": ["a"],
}
GOOD = ("f", '{"a": 1.5, "type": ["x"]}')
QUESTION = Question("q_0", "simple", [], [{"name": "f", "parameters": as_schema(PARAMETERS)}])


@pytest.mark.parametrize(
    ("kind", "calls", "ended", "fault"),
    [
        ("required", [GOOD, GOOD], "tool_calls", None),
        ("messages", [("f", json.loads(GOOD[1]))], "tool_use", None),
        ("auto", [], "stop", None),
        ("required", [], "length", None),
        ("required", [GOOD, ("f", '{"a"')], "length", None),
        ("required", [("f", '{"a"'), GOOD], "length", "no JSON"),
        ("required", [("f", '{"a"')], "tool_calls", "no JSON"),
        ("required", [("g", "{}")], "tool_calls", "none of the functions"),
        ("required", [("f", "{}")], "tool_calls", '"a" is a required property'),
        ("required", [("f", '{"a": 1e999}')], "tool_calls", "number"),
        ("required", [("f", '{"a": 1, "type": [2]}')], "tool_calls", "string"),
        ("required", [], "tool_calls", "no call"),
        ("required", [GOOD], "stop", "ended by stop"),
    ],
)
def test_faults(kind, calls, ended, fault):
    found = Ask(QUESTION, kind).fault(calls, ended)
    assert found is None if fault is None else fault in found


def test_calls_are_read_off_each_route():
    name, arguments = GOOD
    message = {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    bodies = {
        "required": {"choices": [{"message": message, "finish_reason": "tool_calls"}]},
        "messages": {
            "content": [{"type": "tool_use", "name": name, "input": json.loads(arguments)}],
            "stop_reason": "max_tokens",
        },
        "responses": {
            "output": [{"type": "function_call", "name": name, "arguments": arguments}],
            "status": "completed",
        },
    }
    for kind, body in bodies.items():
        calls, ended = Ask(QUESTION, kind).calls(body)
        assert ended == ("length" if kind == "messages" else "tool_calls")
        assert Ask(QUESTION, kind).fault(calls, ended) is None
        assert len(calls) == 1

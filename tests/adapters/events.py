"""Streams of other APIs, folded into whole answers as their clients do it."""

from __future__ import annotations

import json
from collections.abc import Iterable

from pydantic_core import from_json


def events_of(raw: bytes | str) -> list[dict]:
    """The events of a stream; each is named by its type."""
    text = raw if isinstance(raw, str) else raw.decode()
    events = []
    for part in filter(None, text.split("\n\n")):
        head, data = part.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        events.append(event)
    return events


def folded_message(events: Iterable[dict]) -> dict:
    """The message of a stream, whose order is checked."""
    events = [event for event in events if event["type"] != "ping"]
    first, *parts, delta, stop = events
    assert first["type"] == "message_start"
    assert (delta["type"], stop) == ("message_delta", {"type": "message_stop"})
    message = first["message"]
    assert message["content"] == []
    assert message["stop_reason"] is message["stop_sequence"] is None
    opened, arguments = None, ""
    for event in parts:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert opened is None
            assert index == len(message["content"])
            opened, arguments = index, ""
            message["content"].append(event["content_block"])
            continue
        assert index == opened
        block = message["content"][index]
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = from_json(arguments or "{}", allow_partial=True)
            opened = None
            continue
        told = event["delta"]
        match told["type"]:
            case "text_delta":
                block["text"] += told["text"]
            case "thinking_delta":
                block["thinking"] += told["thinking"]
            case "signature_delta":
                block["signature"] = told["signature"]
            case "input_json_delta":
                arguments += told["partial_json"]
    assert opened is None
    return message | delta["delta"] | {"usage": message["usage"] | delta["usage"]}


def folded_response(events: Iterable[dict]) -> dict:
    """The response of a stream, whose order is checked: what its events tell is what its last one
    has."""
    events = list(events)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, begun, *parts, last = events
    assert (created["type"], begun["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == begun["response"]
    assert begun["response"]["status"] == "in_progress"
    assert last["type"] == f"response.{last['response']['status']}"
    output: list[dict] = []
    opened = False
    text = ""
    for event in parts:
        kind, index = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert not opened
            assert index == len(output)
            output.append(event["item"])
            opened, text = True, ""
            continue
        assert opened
        assert index == len(output) - 1
        item = output[index]
        if kind == "output_item.done":
            written = item.get("content", [{"text": item.get("arguments")}])[0]["text"]
            assert written == text
            assert {**event["item"], "status": None} == {**item, "status": None} or (
                item["type"] == "reasoning"
            )
            output[index], opened = event["item"], False
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            assert item["content"] == []
            item["content"].append(event["part"])
        elif kind == "content_part.done":
            assert event["part"] == item["content"][0]
        elif kind.endswith(".delta"):
            text += event["delta"]
            if item["type"] == "function_call":
                item["arguments"] += event["delta"]
            else:
                item["content"][0]["text"] += event["delta"]
        else:
            assert kind.endswith(".done")
            assert event.get("text", event.get("arguments")) == text
    assert not opened
    assert output == last["response"]["output"]
    return last["response"]

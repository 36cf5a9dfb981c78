"""LangChain, pydantic-ai, instructor, LiteLLM, and clients of messages and responses, against the
server. They live in an environment of their own, which `scripts/test` makes: ONESTEM_CLIENTS names
its Python."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("ONESTEM_CLIENTS")


@pytest.mark.skipif(PYTHON is None, reason="ONESTEM_CLIENTS names no Python with the clients")
def test_agents_libraries(embedded):
    script = Path(__file__).parent / "clients.py"
    done = subprocess.run(
        [PYTHON, script, f"{embedded.url}/v1"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    chain = found["langchain"]
    assert chain["called"] == chain["streamed"]
    ((name, arguments),) = chain["called"]
    assert name == "is_warm"
    assert set(arguments) == {"city"}
    assert chain["finish_reason"] == "tool_calls"
    assert chain["text"]
    for answer in (chain["structured"], found["pydantic_ai"], *found["instructor"]):
        assert isinstance(answer["yes"], bool)
        assert 0 <= answer["degrees"] <= 9
    name, arguments = found["litellm"]["called"]
    assert name == "f"
    assert set(arguments) == {"yes", "degrees"}
    assert found["litellm"]["finish_reason"] == "tool_calls"
    assert found["litellm"]["streamed"]
    assert found["litellm"]["vllm"]
    _check_messages(found["anthropic"])
    _check_responses(found["responses"])


def _check_messages(found: dict) -> None:
    whole, streamed, beta = found["text"]
    assert whole == streamed == beta
    assert whole[0]["text"]
    whole, streamed, beta = found["called"]
    assert whole == streamed == beta
    block, reason, _ = whole
    assert reason == "tool_use"
    assert set(block["input"]) == {"yes", "degrees"}
    assert found["then"] > 10
    counted, read, written = found["counted"]
    assert (read, written) == (counted - 1, 1)
    (model, kind, request), (image, image_kind, _) = found["errors"].values()
    assert (model, kind) == ("NotFoundError", "not_found_error")
    assert (image, image_kind) == ("BadRequestError", "invalid_request_error")
    assert request.startswith("req-")


def _check_responses(found: dict) -> None:
    for name in ("text", "called"):
        whole, streamed = found[name]
        assert whole == streamed
    assert found["text"][0][0]
    assert found["called"][0][2][0][0] == "f"
    assert found["text_events"] == [
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
    assert found["called_events"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    stored, sent = found["then"]
    assert (stored[:2], stored[2], sent[2]) == (sent[:2], True, False)
    assert found["cached"] == sent[1] - 1
    assert found["got"] == stored[0]
    assert set(found["parsed"]) == {"yes", "degrees"}
    assert found["errors"] == {
        "deleted": ["NotFoundError", "previous_response_id"],
        "tool": ["BadRequestError", "tools"],
    }

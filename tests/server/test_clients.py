"""LangChain, pydantic-ai, instructor and LiteLLM against the server. They live in an environment of
their own, which `scripts/test` makes: ONESTEM_CLIENTS names its Python."""

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

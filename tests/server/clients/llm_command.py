"""`llm`, Simon Willison's command line, as it is used: a process for each command."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.server.clients.asked import URL, USER, Answer

FUNCTION = """
def is_warm(city: str) -> str:
    "Whether a city is warm."
    return f"{city} is warm."
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with the server's model, over chats and over responses."""
    path = tmp_path_factory.mktemp("llm")
    entry = {"model_name": "embedded", "api_base": f"{URL}/v1", "supports_schema": True,
             "supports_tools": True}  # fmt: skip
    models = [{**entry, "model_id": "chat"}, {**entry, "model_id": "responses", "responses": True}]
    (path / "extra-openai-models.yaml").write_text(json.dumps(models))
    (path / "functions.py").write_text(FUNCTION)
    return path


@pytest.fixture
def llm(home):
    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *arguments], capture_output=True, text=True,
            env={**os.environ, "LLM_USER_PATH": str(home)}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


LIMITS = ["-o", "max_tokens", "40", "-o", "temperature", "0"]
APIS = pytest.mark.parametrize("api", ["chat", "responses"])


@APIS
def test_a_conversation_that_goes_on(llm, api):
    how = ["-m", api, *LIMITS]
    first = llm(*how, "-s", "Be brief.", USER)
    then = llm(*how, "-c", "And in Paris?")
    assert first.strip()
    assert then.strip()
    before, after = json.loads(llm("logs", "-n", "2", "--json", "-m", api))
    assert (before["response"].strip(), after["response"].strip()) == (first.strip(), then.strip())
    assert before["conversation_id"] == after["conversation_id"]
    assert after["input_tokens"] > before["input_tokens"] + before["output_tokens"]


@APIS
def test_a_schema(llm, api):
    made = llm("-m", api, *LIMITS, "--schema", json.dumps(Answer.model_json_schema()), USER)
    assert Answer.model_validate_json(made)


@APIS
def test_a_tool_is_offered(llm, home, api):
    """`llm` cannot require a call; what this model says to an offer is a text."""
    functions = str(home / "functions.py")
    made = llm("-m", api, *LIMITS, "--functions", functions, USER)
    (log,) = json.loads(llm("logs", "-n", "1", "--json", "-m", api))
    assert log["response"].strip() == made.strip() != ""
    assert [tool["name"] for tool in log["tools"]] == ["is_warm"]

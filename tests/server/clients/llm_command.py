"""`llm`, Simon Willison's command line, as it is used: a process for each command."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.request import Request, urlopen

import pytest

from tests.server.clients import asked
from tests.server.clients.asked import BRIEF, CITIES, KEEPS_TOOLS, URL, USER, Answer

# It takes all that a file defines for tools.
FUNCTION = inspect.getsource(asked.is_warm).replace(
    "City", "__import__('typing').Literal" + str([*CITIES])
)


class Requiring(BaseHTTPRequestHandler):
    """Passes calls on to the server, which is to require a call of a tool, but none behind a result
    of one: `llm` cannot ask for that."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = body.get("messages") or body["input"]
        has_result = any("call_id" in one or "tool_call_id" in one for one in said)
        if "tools" in body:
            choice = "none" if has_result else "required"
            body |= {"tool_choice": choice, "parallel_tool_calls": False}
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(URL + self.path, json.dumps(body).encode(), headers)) as answer:
            told = answer.read()
            self.send_response(200)
            self.send_header("Content-Type", answer.headers["Content-Type"])
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)


@pytest.fixture(scope="module")
def requiring():
    """The root of a server that requires calls."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Requiring) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def home(tmp_path_factory, requiring):
    """A home with the server's model, over chats and over responses."""
    path = tmp_path_factory.mktemp("llm")
    entry = {"model_name": "embedded", "supports_schema": True, "supports_tools": True}
    models = [
        {**entry, "model_id": api + name, "api_base": f"{root}/v1", "responses": api != "chat"}
        for api in ("chat", "responses")
        for name, root in (("", URL), ("-calls", requiring))
    ]
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
    first = llm(*how, "-s", BRIEF, USER)
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
    """What this model says to an offer is a text."""
    functions = str(home / "functions.py")
    made = llm("-m", api, *LIMITS, "--functions", functions, USER)
    (log,) = json.loads(llm("logs", "-n", "1", "--json", "-m", api))
    assert log["response"].strip() == made.strip() != ""
    assert [tool["name"] for tool in log["tools"]] == ["is_warm"]


@APIS
@pytest.mark.parametrize("how", [[], ["--no-stream"]], ids=["streamed", "whole"])
def test_a_tool_is_called_and_its_result_is_answered(llm, home, api, how):
    model, functions = f"{api}-calls", str(home / "functions.py")
    limits = ["-o", "max_tokens", "80", "-o", "temperature", "0"]
    made = llm("-m", model, *limits, *how, "--functions", functions, USER)
    called, then = json.loads(llm("logs", "-n", "2", "--json", "-m", model))
    (call,) = called["tool_calls"]
    city = call["arguments"]["city"]
    assert (call["name"], city in CITIES) == ("is_warm", True)
    (result,) = then["tool_results"]
    assert (result["name"], result["output"]) == ("is_warm", f"{city} is warm.")
    assert result["tool_call_id"] == call["tool_call_id"]
    assert then["response"].strip() == made.strip() != ""
    read = called["input_tokens"] + called["output_tokens"]
    assert not KEEPS_TOOLS or then["input_tokens"] > read

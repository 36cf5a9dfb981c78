"""`onestem bench serve` against a server on a socket."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lab.tests.load.socket_server import running
from onestem.cli.app import app
from onestem.errors import OnestemError
from onestem_lab.load.search import RateSearch

SMALL = ["--rate", "300", "--requests", "12", "--scale", "0.02", "--system-tokens", "5"]


def bench(*arguments: str):
    return CliRunner().invoke(app, ["bench", "serve", *arguments])


def test_one_json_line():
    with running() as (url, server):
        done = bench("--base-url", url, "--api-key", "abc", "--json", "--apps", "3", *SMALL)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["case"]["apps"] == 3
    assert result["server"] == {"base_url": url}
    (run,) = result["runs"]
    assert (run["requests"], run["answered"], run["failed"], run["torn"]) == (12, 12, 0, 0)
    assert run["ttft"]["p99"] > 0
    # A warm-up for each application, then the requests; the model is the one that is listed.
    assert len(server.bodies) == 15
    assert {body["model"] for body in server.bodies} == {"fake-model"}
    assert server.keys == {"bearer abc"}


def test_a_torn_stream_ends_with_code_1():
    with running(spoil=lambda events: events[:-1]) as (url, _):
        done = bench("--base-url", url, *SMALL)
    assert done.exit_code == 1
    assert "some requests failed" in done.stderr
    assert "without [DONE]" in done.stdout


def test_plain_requests_carry_openais_fields_alone():
    with running() as (url, server):
        assert bench("--base-url", url, "--plain", "--prompts", "text", *SMALL).exit_code == 0
    allowed = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert all(set(body) == allowed for body in server.bodies)
    assert all(isinstance(body["prompt"], str) for body in server.bodies)


def test_lengths_are_those_that_are_asked_for():
    lengths = ("--system-tokens", "0", "--question", "uniform:3..4", "--answer", "2")
    with running() as (url, server):
        done = bench("--base-url", url, "--json", *lengths, "--requests", "8", "--rate", "500")
    told = json.loads(done.stdout)["case"]
    assert (told["question"], told["answer"]) == ("uniform:3..4", 2)
    _, *bodies = server.bodies  # after the warm-up
    assert {len(body["prompt"]) for body in bodies} == {3, 4}
    assert {body["max_tokens"] for body in bodies} == {2}


def test_a_search_reports_every_run():
    with running() as (url, _):
        done = bench(
            "--base-url", url, "--json", "--requests", "3", "--scale", "0.01",
            "--start-rate", "5000", "--resolution", "3",
        )  # fmt: skip
    result = json.loads(done.stdout)
    # Which rates held is the machine's; what follows from that is the search's.
    search = RateSearch(5000, resolution=3)
    for run in result["runs"]:
        assert run["rate"] == search.next_rate()
        search.record(run["rate"], run["held"])
    assert search.next_rate() is None
    assert result["sustainable_rate"] == search.best


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--base-url", "http://127.0.0.1:9", "--share", "off"], "--share is for our own server"),
        (["--base-url", "http://127.0.0.1:9"], "names no model"),
        (["--base-url", "http://127.0.0.1:9", "--prompts", "x"], "expected ids or text"),
        (["--app", "x"], "expected NAME=FILE"),
        (["--answer", "gsm8k"], "answer is 'gsm8k': expected a number"),
        (["--app", "x=/nowhere/at/all"], "cannot be read"),
        (["--app", "x=/tmp/a", "--log", "/tmp/../tmp/a"], "log /tmp/../tmp/a is the text of app x"),
        (["--app", "x=/tmp/a", "--trace", "/tmp/a"], "trace /tmp/a is the text of app x"),
        (["--answer", "file:/tmp/a", "--log", "/tmp/a"], "log /tmp/a is the file of lengths of an"),
        (["--log", "/tmp/a", "--trace", "/tmp/a"], "log /tmp/a is the trace: choose another file"),
    ],
)
def test_mistakes_are_one_line(arguments, says):
    done = bench(*arguments)
    assert isinstance(done.exception, OnestemError)
    assert says in str(done.exception)


def test_a_log_over_the_file_of_options(tmp_path):
    config = tmp_path / "onestem.toml"
    config.write_text("seed = 1\n")
    done = bench("--config", str(config), "--log", str(config))
    assert isinstance(done.exception, OnestemError)
    assert "is the file of options: choose another file" in str(done.exception)
    assert config.read_text() == "seed = 1\n"

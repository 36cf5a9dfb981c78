"""Bodies that would cost too much are refused before they do, alone and as lines of a batch."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from onestem.engine.schedule.answers import ENTRY_BYTES
from onestem.server.api import prepare
from tests.server.harness import running
from tests.server.test_batches import create, ended
from tests.server.test_job_ends import errors_of, line
from tests.server.test_refusals import ask

ALL_IDS = list(range(2560))

TOO_MUCH = [
    ("choices", [f"c{i}" for i in range(1025)], "choices has 1025 texts, limit is 1024"),
    ("choices", ["word " * 100 + str(i) for i in range(200)], "limit is 8192: pick among fewer"),
    ("choices", ["word " * 50_000, "word " * 60_000], "choices has 550000 characters"),
    ("stop", [f"s{i}" for i in range(65)], "stop has 65 texts, limit is 64"),
    ("prompt", "word " * 100_000, "prompt has 500000 characters, limit is"),
]


@pytest.mark.parametrize(("name", "value", "message"), TOO_MUCH, ids=range(len(TOO_MUCH)))
def test_what_would_cost_too_much(embedded, name, value, message):
    with embedded.http() as http:
        answer = ask(http, "completions", **{name: value})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == name
        assert message in error["message"]


def test_lines_that_would_cost_too_much(embedded):
    lines = {f"{i}": line(f"{i}", **{name: value}) for i, (name, value, _) in enumerate(TOO_MUCH)}
    with embedded.http() as http:
        batch = ended(http, create(http, b"".join(lines.values()) + line("good"))["id"])
        assert batch["request_counts"] == {"total": 6, "completed": 1, "failed": 5}
        errors = errors_of(http, batch)
        for i, (_, _, message) in enumerate(TOO_MUCH):
            assert errors[str(i)]["code"] == "invalid_request"
            assert message in errors[str(i)]["message"]


def test_by_how_much_a_text_is_too_long(embedded):
    """Can be asked, up to four times the model's length."""
    with embedded.http() as http:
        refused = ask(http, "completions", prompt="a" * 1_000_000).json()["error"]["message"]
        limit = int(refused.split("limit is ")[1].split(",")[0])
        for length, status in ((limit, 200), (4 * limit, 200), (4 * limit + 1, 400)):
            answer = http.post("/tokenize", json={"prompt": "a" * length})
            assert answer.status_code == status
            if status == 200:
                assert answer.json()["count"] > answer.json()["max_model_len"]
        assert f"limit is {4 * limit}" in answer.json()["error"]["message"]


def test_as_many_as_are_allowed(embedded):
    with embedded.http() as http:
        choices = [f"{i}" for i in range(1024)]
        answer = ask(http, "completions", choices=choices)
        assert answer.json()["choices"][0]["text"] in choices
        assert ask(http, "completions", stop=["~~~"] * 64).status_code == 200


def test_choices_of_many_prompts_are_bounded_together(embedded):
    with embedded.http() as http:
        answer = ask(http, "completions", prompt=["a"] * 12, choices=list(map(str, range(342))))
        assert answer.status_code == 400
        assert "limit is 4096 sequences in all" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "choices"


def test_answers_that_are_written_whole_are_bounded_together(tmp_path, tiny_model):
    """A stream is read as it comes, and the engine bounds what runs at once."""
    body = {"prompt": ["a"] * 4, "max_tokens": 20, "logprobs": 4}
    one = 20 * 5 * ENTRY_BYTES
    with running(tmp_path, model=tiny_model, engine={"answer_memory": 8 * 3 * one}) as server:
        with server.http() as http:
            answer = ask(http, "completions", **body)
            assert answer.status_code == 400
            told = "4 prompts ask for answers of up to 35.2 KiB in memory, limit is 26.4 KiB"
            assert f"{told}: send fewer at once, or stream" in answer.text
            fewer = ask(http, "completions", **body | {"prompt": ["a"] * 3})
            assert fewer.status_code == 200, fewer.text
            assert ask(http, "completions", **body, stream=True).status_code == 200
        server.check()


def test_a_line_of_a_batch_is_bounded_like_a_call_that_is_no_stream(tmp_path, tiny_model):
    fits, large = ({"max_tokens": count, "logprobs": 4} for count in (20, 21))
    most = 8 * 20 * 5 * ENTRY_BYTES
    with running(tmp_path, model=tiny_model, engine={"answer_memory": most}) as server:
        with server.http() as http:
            batch = ended(http, create(http, line("fits", **fits) + line("large", **large))["id"])
            assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
            refused = ask(http, "completions", **large).json()["error"]["message"]
            assert errors_of(http, batch)["large"]["message"] == refused
            assert ask(http, "completions", **fits).status_code == 200
        server.check()


def test_an_error_shows_the_start_of_what_is_wrong(embedded):
    with embedded.http() as http:
        for choices in (["c"] * 900, ["x" * 5000, "x" * 5000]):
            error = ask(http, "completions", choices=choices).json()["error"]
            assert len(error["message"]) < 150
            assert error["param"] == "choices"


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_fields_that_let_no_token_follow(embedded, endpoint):
    forbidden = {"min_tokens": 4, "stop_token_ids": ALL_IDS}
    with embedded.http() as http:
        answer = ask(http, endpoint, **forbidden)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "stop_token_ids"
        assert "stop_token_ids and min_tokens together forbid all of them" in error["message"]
        assert "response_format" not in error["message"]
        streamed = ask(http, endpoint, **forbidden, stream=True).text.split("\n\n")
        assert json.loads(streamed[-3].removeprefix("data: "))["error"] == error
        answer = ask(http, endpoint, **forbidden, response_format={"type": "json_object"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "response_format"


def test_lines_that_let_no_token_follow(embedded):
    raw = line("a", min_tokens=2, stop_token_ids=ALL_IDS) + line("b")
    with embedded.http() as http:
        batch = ended(http, create(http, raw)["id"])
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert errors_of(http, batch)["a"]["code"] == "invalid_request"


def test_chats_that_would_cost_too_much(embedded):
    with embedded.http() as http:
        for messages, limit in (
            ([{"role": "user", "content": "x"}] * 4097, "has 4097 messages, limit is 4096"),
            (
                [{"role": "user", "content": [{"type": "text", "text": "x"}] * 5000}],
                "5000 text parts",
            ),
            ([{"role": "user", "content": "word " * 100_000}], "500000 characters"),
        ):
            answer = ask(http, "chat/completions", messages=messages)
            assert answer.status_code == 400
            assert limit in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == "messages"


def test_prefixes_and_schemas_that_would_cost_too_much(embedded):
    modules = "".join(f'<module name="m{i}">x</module>' for i in range(4096))
    with embedded.http() as http:
        for path, body, limit in (
            ("prefixes/p", {"text": "word " * 100_000}, "text has 500000 characters"),
            ("schemas/s", {"pml": f'<schema name="s">{modules}</schema>'}, "has 4097 elements"),
            ("schemas/s", {"pml": f'<schema name="s">{"word " * 100_000}</schema>'}, "characters"),
        ):
            answer = http.put(f"/v1/{path}", json=body)
            assert answer.status_code == 400
            assert limit in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == next(iter(body))


def test_large_bodies_are_read_beside_the_event_loop(embedded, monkeypatch):
    """While one is read, others are answered."""
    reading, go_on = threading.Event(), threading.Event()
    read = prepare.read_object

    def slow(raw):
        if len(raw) > 100_000:
            reading.set()
            assert go_on.wait(30)
        return read(raw)

    monkeypatch.setattr(prepare, "read_object", slow)
    with embedded.http() as http, ThreadPoolExecutor(1) as pool:
        large = pool.submit(ask, http, "completions", prompt="x " * 100_000)
        assert reading.wait(30)
        assert ask(http, "completions").status_code == 200
        go_on.set()
        assert large.result().status_code == 400


def test_a_grammar_that_takes_longer_than_the_request_has(tmp_path, tiny_model):
    def slow(llm):
        llm.engine.requests.prepare = lambda *request: Future()  # which nobody ends

    with running(tmp_path, model=tiny_model, change=slow) as server, server.http() as http:
        asked = {"response_format": {"type": "json_object"}, "timeout": 0.05}
        answer = ask(http, "completions", **asked)
        assert answer.status_code == 504
        assert answer.json()["error"]["param"] == "timeout"

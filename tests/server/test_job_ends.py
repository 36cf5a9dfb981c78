"""How batches end that do not end well: what was answered stays, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
import math
import threading

import pytest

from onestem.errors import RequestError
from onestem.request import Request, SamplingParams
from onestem.server.errors import ApiError, BusyError, EngineDownError, NoAnswerError
from onestem.server.objects import job_attempt, jobs
from onestem.server.objects.job_attempt import JobAttempt, StoppedError
from onestem.server.objects.job_files import keep_output
from onestem.server.objects.reading import Reading
from onestem.server.objects.store import Store
from onestem.server.objects.tenants import Tenant
from tests.server.test_batches import create, ended, output, three_of_thirty_answered


def line(name: str, **body) -> bytes:
    body = {"prompt": "hi", "max_tokens": 2, **body}
    made = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(made).encode() + b"\n"


def errors_of(http, batch: dict) -> dict[str, dict]:
    raw = http.get(f"/v1/files/{batch['error_file_id']}/content").content
    return {one["custom_id"]: one["error"] for one in map(json.loads, raw.splitlines())}


def deep(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def test_a_line_that_nests_too_deeply_is_that_lines_error(embedded):
    raw = line("a") + line("b", response_format=deep(300)) + line("c")
    with embedded.http() as http:
        batch = ended(http, create(http, raw)["id"])
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert "limit is 65" in errors_of(http, batch)["b"]["message"]


def test_a_job_that_fails_keeps_what_is_answered(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(jobs, "MOST_DEATHS", 1)
    scene = three_of_thirty_answered(tmp_path, tiny_model)
    with scene as (server, http, held, batch_id):
        server.launcher.kill()
        held.forget()
        batch = ended(http, batch_id)
        held.let(math.inf)
        assert batch["status"] == "failed"
        answered = [json.loads(one)["custom_id"] for one in output(http, batch).splitlines()]
        assert 3 <= len(answered) < 30
        assert set(errors_of(http, batch)) == {"line-1", None}


class Answers:
    """An engine's client with some answers to give."""

    def __init__(self, answers):
        self.answers = answers

    async def ask(self, *what, **whose):
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer


WITH_GRAMMAR = Request(
    request_id="a",
    prompt_token_ids=[1],
    params=SamplingParams(response_format={"type": "json_object"}),
)


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (NoAnswerError(60.0), RequestError),
        (BusyError("regex was not compiled within 60 s"), RequestError),
        (ApiError(500, "the request cannot be checked: RecursionError"), RequestError),
        (RequestError("response_format is not good"), RequestError),
        (EngineDownError("the engine died"), EngineDownError),
    ],
)
def test_what_cannot_be_found_out_is_the_lines_error(tmp_path, loop, monkeypatch, error, raised):
    monkeypatch.setattr(job_attempt, "PAUSES", (0.0, 0.0))
    client = Answers([error] * 3)
    reading = Reading(tmp_path / "reading")
    attempt = JobAttempt("batch_1", client, loop, Tenant("a"), reading)
    with pytest.raises(raised, match=str(error)[:20]) as caught:
        attempt.validate(lambda request: None, WITH_GRAMMAR)
    is_busy = isinstance(error, (BusyError, NoAnswerError))
    assert len(client.answers) == (0 if is_busy else 2)
    assert str(caught.value).endswith(" (tried 3 times)") == is_busy


def test_what_a_busy_machine_had_no_time_for_is_asked_again(tmp_path, loop, monkeypatch):
    monkeypatch.setattr(job_attempt, "PAUSES", (0.0, 0.0))
    client = Answers([BusyError("it is busy"), NoAnswerError(60.0), None])
    attempt = JobAttempt("batch_1", client, loop, Tenant("a"), Reading(tmp_path / "reading"))
    attempt.validate(lambda request: None, WITH_GRAMMAR)
    assert client.answers == []


def test_a_job_that_waits_for_a_grammar_can_be_stopped(tmp_path, loop):
    class Silent:
        async def ask(self, *what, **whose):
            attempt.stop(StoppedError("cancelled"))
            await asyncio.Event().wait()

    attempt = JobAttempt("batch_1", Silent(), loop, Tenant("a"), Reading(tmp_path / "reading"))
    with pytest.raises(StoppedError):
        attempt.validate(lambda request: None, WITH_GRAMMAR)


def test_putting_an_output_away_twice_is_as_once(tmp_path):
    """As where the server was killed between the file and its record."""
    store = Store(tmp_path)
    journal = tmp_path / "output.jsonl.partial"
    journal.write_bytes(b'{"error": null}\n{"error": {"code": "x"}}\n{"error": {"co')
    first = keep_output(store, "me", "batch_12", journal)
    assert first == keep_output(store, "me", "batch_12", journal) == ("file-12o", "file-12e")
    assert (store.files / "file-12o").read_bytes().count(b"\n") == 2
    assert (store.files / "file-12e").read_bytes() == b'{"error": {"code": "x"}}\n'
    assert [row["bytes"] for row in store.list_files("me")] == [25, 41]
    assert keep_output(store, "me", "batch_13", journal) == (None, None)
    store.close()

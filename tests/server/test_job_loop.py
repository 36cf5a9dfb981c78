"""The loop that runs all keys' batches: nothing that one batch does ends it, or holds it up."""

from __future__ import annotations

import errno
import itertools
import json
import math
import sqlite3
from contextlib import suppress

import pytest

from onestem.batch import Progress
from onestem.batch.workplace import DiskFullError
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import JobError
from onestem.server.objects import jobs
from onestem.server.objects.reading import MOST_ENDS, Reading
from tests.batch.fakes import completion, run_fake, write_lines
from tests.server.harness import Held, running
from tests.server.test_batches import create, ended, lines, output
from tests.server.test_job_ends import errors_of, line


class PanicException(BaseException):
    """As a library in Rust raises it: no `Exception`."""


@pytest.fixture
def server(tmp_path, tiny_model):
    with running(tmp_path / "state", model=tiny_model) as server:
        yield server
        server.check()


@pytest.fixture
def http(server):
    with server.http() as http:
        yield http


def fail_once(monkeypatch, name: str, error: BaseException) -> None:
    """Let a function of the loop's module fail when it is called first."""
    real, errors = getattr(jobs, name), [error]

    def failing(*args, **kwargs):
        if errors:
            raise errors.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(jobs, name, failing)


ENDS = [PanicException("index out of range"), StopIteration(), SystemExit(3), KeyboardInterrupt()]


@pytest.mark.parametrize("error", [*ENDS, RuntimeError("a fault")])
def test_whatever_ends_a_batch_ends_that_one_alone(http, monkeypatch, error):
    fail_once(monkeypatch, "run_job", error)
    first, second = (create(http, lines(5))["id"] for _ in range(2))
    failed = ended(http, first)
    assert failed["status"] == "failed"
    (told,) = failed["errors"]["data"]
    assert type(error).__name__ in told["message"]
    assert "\n" not in told["message"]
    assert ended(http, second)["status"] == "completed"


@pytest.mark.parametrize("error", [PanicException("overflow"), RuntimeError("a fault")])
def test_a_panic_over_a_text_is_that_lines_error(http, monkeypatch, error):
    real = Tokenizer.encode_batch

    def encode_batch(self, texts, **how):
        if any("panic" in raw.text for raw in texts):
            raise error
        return real(self, texts, **how)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
    batch = ended(http, create(http, line("a") + line("b", prompt="panic") + line("c"))["id"])
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    told = errors_of(http, batch)["b"]["message"]
    assert told == f"the line cannot be read: {type(error).__name__}: {error}"


@pytest.mark.parametrize("name", ["open_batches", "save_batch"])
def test_a_store_that_fails_for_a_while_ends_no_batch(server, http, monkeypatch, name):
    held = []
    real = getattr(server.service.store, name)
    monkeypatch.setattr(server.service.jobs, "woken", lambda seconds: held.append(seconds) or now())

    async def now() -> None:
        pass

    def failing(*args):
        if len(held) < 3 and (name == "open_batches" or args[2]["status"] == "finalizing"):
            raise sqlite3.OperationalError("database or disk is full")
        return real(*args)

    monkeypatch.setattr(server.service.store, name, failing)
    batch = ended(http, create(http, lines(5))["id"])
    assert batch["status"] == "completed"
    assert held == [0.5, 1.5, 3.5]


def test_a_full_disk_holds_a_batch_up_and_loses_nothing(server, http, monkeypatch):
    waited = []

    async def woken(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(server.service.jobs, "woken", woken)
    fail_once(monkeypatch, "run_job", DiskFullError("output.jsonl: No space left on device"))
    batch = ended(http, create(http, lines(5))["id"])
    assert batch["status"] == "completed"
    assert waited == [0.5]


def test_a_full_disk_at_the_end_of_a_batch_loses_nothing(server, http, monkeypatch):
    expected = output(http, ended(http, create(http, lines(5))["id"]))
    waited = []

    async def woken(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(server.service.jobs, "woken", woken)
    fail_once(monkeypatch, "keep_output", OSError(errno.ENOSPC, "No space left on device"))
    batch = ended(http, create(http, lines(5))["id"])
    assert batch["status"] == "completed"
    assert output(http, batch) == expected
    assert waited == [0.5]


def test_a_full_disk_is_told_from_other_errors(tmp_path):
    from onestem.batch.workplace import file_errors

    for number, full in ((errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)):
        with pytest.raises(JobError) as caught, file_errors(tmp_path):
            raise OSError(number, "it fails")
        assert isinstance(caught.value, DiskFullError) == full


def test_a_whole_output_is_put_away_whatever_has_changed(tmp_path, tiny_model):
    """The server died between the end of a job and its record; another model is served now."""
    with running(tmp_path, model=tiny_model) as server, server.http() as http:
        batch = ended(http, create(http, lines(9))["id"])
        first = output(http, batch)
        place = server.service.store.work / batch["id"] / "output.jsonl"
        place.parent.mkdir()
        place.write_bytes(first)
        torn = {**batch, "status": "in_progress", "completed_at": None, "output_file_id": None}
        server.service.store.save_batch(batch["id"], "", torn)
    with running(tmp_path) as server, server.http() as http:
        again = ended(http, batch["id"])
        assert again["request_counts"] == batch["request_counts"]
        assert output(http, again) == first


def died(reading: Reading, at: int) -> None:
    """A process began to read a batch, came to a byte of it, and ended."""
    reading.begin()
    reading.note(Progress(stage="read", done=at, total=100))


def test_who_ends_the_process_at_one_place_is_not_read_again(tmp_path):
    file = tmp_path / "reading.json"
    for _ in range(MOST_ENDS):
        died(Reading(file), 40)
    with pytest.raises(JobError, match=r"ended 3 times while it read this .* byte 40 of"):
        Reading(file).begin()


def test_ends_at_other_places_blame_nobody(tmp_path):
    file = tmp_path / "reading.json"
    for at in (10, 40, 30, 30, 20, 30, 10, 0, 50):
        died(Reading(file), at)
    last = Reading(file)
    last.begin()
    last.note(Progress(stage="run", done=1, total=3))
    assert not file.exists()


def test_ends_while_no_line_is_in_hand_blame_nobody(tmp_path):
    """Before the first line, and while the engine has one, which another process reads."""
    file = tmp_path / "reading.json"
    for _ in range(2 * MOST_ENDS):
        Reading(file).begin()
        reading = Reading(file)
        reading.begin()
        reading.note(Progress(stage="read", done=0, total=100))
        with suppress(ZeroDivisionError), reading.elsewhere():
            before = file.read_bytes()
            raise ZeroDivisionError
        file.write_bytes(before)  # as if it had ended there
    died(Reading(file), 0)
    for _ in range(MOST_ENDS):
        Reading(file).begin()


def test_after_an_end_lines_are_read_one_by_one(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [completion(f"c{i}") for i in range(4)])
    sizes = [len(raw) for raw in source.read_bytes().splitlines(keepends=True)]
    file, done = tmp_path / "reading.json", []

    def note(progress: Progress) -> None:
        done[-1] += [progress.done] if progress.stage == "read" else []

    for number in range(2):
        reading = Reading(file)
        reading.begin()
        done.append([])
        output = tmp_path / f"{number}.jsonl"
        run_fake(source, output, line_by_line=reading.line_by_line, on_progress=note)
        died(Reading(file), 0)
    assert done == [[0, sum(sizes)], [0, *itertools.accumulate(sizes)]]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"at": null}'])
def test_a_damaged_note_blames_nobody(tmp_path, content):
    (file := tmp_path / "reading.json").write_bytes(content)
    Reading(file).begin()


def test_a_batch_that_ended_the_server_is_passed_by(tmp_path, tiny_model):
    held = Held()
    with running(tmp_path, model=tiny_model, change=held) as server, server.http() as http:
        bad, good = (create(http, lines(5))["id"] for _ in range(2))
        server.until(lambda: server.service.jobs.active is not None)
        server.on_loop(server.service.jobs.stop)
        work = server.service.store.work / bad / "reading.json"
        assert not work.exists()  # it was stopped in good order
        record = http.get(f"/v1/batches/{bad}").json()
        server.service.store.save_batch(bad, "", {**record, "status": "validating"})
        held.let(math.inf)
    work.write_text(json.dumps({"at": 7, "before": 7, "ends": MOST_ENDS - 1}))
    with running(tmp_path, model=tiny_model) as server, server.http() as http:
        failed = ended(http, bad)
        assert failed["status"] == "failed"
        assert "the server ended 3 times" in failed["errors"]["data"][0]["message"]
        assert ended(http, good)["status"] == "completed"

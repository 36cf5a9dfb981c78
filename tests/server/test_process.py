"""`onestem serve` as it is in earnest: its processes are killed, at the worst moments."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from onestem.cli import main
from tests.server.test_batches import ended, lines, output, upload

WAIT = 90.0
SECRET = "a sentence that no log may ever show"


class Command:
    """A running `onestem serve`."""

    def __init__(self, state: Path, model: Path) -> None:
        self.log = state.with_suffix(f".{time.monotonic_ns()}.log")
        self._file = open(self.log, "wb")  # noqa: SIM115 - closed by `close`
        command = [
            sys.executable, "-c", "from onestem.cli import main; main()", "serve", "--port", "0",
            "--state", str(state), "--model", str(model), "--kv-memory", "1MiB",
            "--max-model-len", "1024", "--device", "cpu", "--dtype", "float32", "--grace", "20",
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=self._file, env=environment)
        self.url = self._wait_for("listening")["url"]
        self.http = httpx.Client(base_url=self.url, timeout=WAIT)

    def events(self) -> list[dict]:
        """The log; each line of it is JSON."""
        raw = self.log.read_bytes()
        return [json.loads(line) for line in raw[: raw.rfind(b"\n") + 1].splitlines()]

    def _wait_for(self, event: str, count: int = 1) -> dict:
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            found = [line for line in self.events() if line["event"] == event]
            if len(found) >= count:
                return found[count - 1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"no {event} in {self.log.read_text()}")

    def engine_ready(self, count: int) -> None:
        self._wait_for("engine_ready", count)

    def engine_pid(self) -> int:
        return self.http.get("/internal/state").json()["engine"]["pid"]

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT)
        self._file.close()


@contextlib.contextmanager
def served(state: Path, model: Path) -> Iterator[Command]:
    command = Command(state, model)
    try:
        yield command
    finally:
        command.close()


def is_gone(pid: int) -> bool:
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{pid}/stat")
        with contextlib.suppress(FileNotFoundError):
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        time.sleep(0.02)
    return False


def ask(command: Command, number: int, ends: dict[int, str]) -> None:
    """One request of many; notes how it ended."""
    body = {"prompt": f"{SECRET} {number}", "max_tokens": 150, "ignore_eos": True}
    stream = number % 2 == 0
    try:
        answer = command.http.post("/v1/completions", json={**body, "stream": stream})
    except httpx.HTTPError as error:
        ends[number] = f"no answer: {error!r}"
        return
    if not stream:
        ok = answer.status_code == 200
        ends[number] = "whole" if ok else answer.json()["error"]["code"]
        return
    if answer.status_code != 200:
        ends[number] = answer.json()["error"]["code"]
        return
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    last = json.loads(events[-3].removeprefix("data: "))
    ends[number] = last["error"]["code"] if "error" in last else "whole"


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    return tmp_path_factory.mktemp("process") / "state"


def test_kill_9_of_the_engine_under_load(state, tiny_model):
    """Every request gets an answer or an error; the job's output is complete, without doubles."""
    ends: dict[int, str] = {}
    with served(state, tiny_model) as command:
        raw = lines(80, ignore_eos=True, temperature=0)
        file = upload(command.http, raw)
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = command.http.post("/v1/batches", json=body).json()["id"]
        threads = [threading.Thread(target=ask, args=(command, i, ends)) for i in range(40)]
        for thread in threads:
            thread.start()
        pid = command.engine_pid()
        os.kill(pid, signal.SIGKILL)
        for thread in threads:
            thread.join(WAIT)
        assert sorted(ends) == list(range(40))
        assert set(ends.values()) <= {"whole", "engine_down"}
        assert "engine_down" in ends.values()
        command.engine_ready(2)
        finished = ended(command.http, batch)
        assert finished["status"] == "completed"
        made = [json.loads(line) for line in output(command.http, finished).splitlines()]
        assert [one["custom_id"] for one in made] == [f"line-{i}" for i in range(80)] + [None]
        again = command.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert again.status_code == 200
        assert SECRET not in command.log.read_text()
        pid = command.engine_pid()
        command.process.kill()
        assert is_gone(pid)


def test_sigterm_lets_streams_end_and_puts_jobs_down(state, tiny_model):
    with served(state, tiny_model) as command:
        file = upload(command.http, lines(200, max_tokens=200, ignore_eos=True))
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = command.http.post("/v1/batches", json=body).json()["id"]
        asked = {"prompt": SECRET, "max_tokens": 500, "ignore_eos": True, "stream": True}
        pid = command.engine_pid()
        with command.http.stream("POST", "/v1/completions", json=asked) as answer:
            parts = answer.iter_text()
            text = next(parts)
            command.process.send_signal(signal.SIGTERM)
            text += "".join(parts)
        events = text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        last = json.loads(events[-3].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert command.process.wait(WAIT) == 0
        assert is_gone(pid)
        assert command.events()[-1]["event"] == "stopped"
    import sqlite3

    with contextlib.closing(sqlite3.connect(state / "server.db")) as db:
        status = db.execute("SELECT status FROM batches WHERE id = ?", (batch,)).fetchone()[0]
    assert status in ("validating", "in_progress")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--api-key-file", "/no/such/file"], "cannot read the key file"),
        (["--app", "x"], "expected NAME=FILE"),
        (["--log-level", "loud"], "expected debug"),
        (["--max-queue", "0"], "max_queue"),
        (["--host", "300.1.1.1"], "cannot listen"),
        (["--model", "/no/such/model"], "no directory"),
    ],
)
def test_options_that_cannot_be_are_one_line(options, reason, monkeypatch, capsys, tmp_path):
    state = ["--port", "0", "--state", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["onestem", "serve", *state, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert reason in told.err

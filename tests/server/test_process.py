"""`onestem serve` as it is in earnest: its processes are killed, at the worst moments."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from onestem.cli import main
from onestem.errors import ConfigError
from onestem.options import EngineOptions
from onestem.server.link.process import EngineProcess
from onestem.shapes import find_shape
from tests.forked import Command
from tests.server.test_batches import ended, lines, output, upload
from tests.soak import soaked

WAIT = 90.0
REQUESTS = 24
SECRET = "a sentence that no log may ever show"


class Server:
    """A running `onestem serve`.

    Args:
        more: options.
    """

    def __init__(self, state: Path, model: Path, *more: object) -> None:
        self.command = Command(
            "serve", "--port", 0, "--state", state, "--model", model, "--kv-memory", "2MiB",
            "--max-model-len", 1024, "--device", "cpu", "--dtype", "float32", "--grace", 20,
            *more,
        )  # fmt: skip
        self.url = self._wait_for("listening")["url"]
        self.http = httpx.Client(base_url=self.url, timeout=WAIT)

    def events(self, name: str | None = None) -> list[dict]:
        """The log; each line of it is JSON."""
        log = self.command.stderr
        events = map(json.loads, log[: log.rfind("\n") + 1].splitlines())
        return [event for event in events if name in (None, event["event"])]

    def _wait_for(self, event: str, count: int = 1) -> dict:
        self.command.until(lambda: len(self.events(event)) >= count, WAIT)
        assert self.command.is_running, self.command.stderr
        return self.events(event)[count - 1]

    def engine_ready(self, count: int) -> None:
        self._wait_for("engine_ready", count)

    def engine_pid(self) -> int:
        return self.http.get("/internal/state").json()["engine"]["pid"]

    def close(self) -> None:
        self.http.close()
        self.command.send(signal.SIGKILL)
        self.command.wait(WAIT)


@contextlib.contextmanager
def served(state: Path, model: Path, *more: object) -> Iterator[Server]:
    server = Server(state, model, *more)
    try:
        yield server
    finally:
        server.close()


def is_gone(pid: int, seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{pid}/stat")
        with contextlib.suppress(FileNotFoundError):
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)


def ask(server: Server, number: int, ends: dict[int, str]) -> None:
    """One request of many; notes how it ended."""
    body = {"prompt": f"{SECRET} {number}", "max_tokens": 60, "ignore_eos": True}
    stream = number % 2 == 0
    try:
        answer = server.http.post("/v1/completions", json={**body, "stream": stream})
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


def start_job(server: Server, raw: bytes) -> str:
    file = upload(server.http, raw)
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch: str = server.http.post("/v1/batches", json=body).json()["id"]
    return batch


def test_a_servers_life(tmp_path, tiny_model):
    """kill -9 of the engine under load; then SIGTERM while a stream and a job run."""
    state = tmp_path / "state"
    with served(state, tiny_model) as server:
        check_start(server, tiny_model)
        check_kill_9(server)
        check_sigterm(server, state)


def check_start(server: Server, model: Path) -> None:
    """What is told while it starts."""
    server.command.until(lambda: len(server.events()) >= 7, WAIT)
    found, loading, ready, loaded, listening, addresses, example = server.events()[:7]
    assert (found["event"], found["path"]) == ("model_found", str(model))
    weights = (model / "model.safetensors").stat().st_size
    assert (loading["event"], loading["weights_bytes"]) == ("loading", weights)
    assert (ready["event"], ready["restarts"]) == ("engine_ready", 0)
    kv = server.http.get("/internal/state").json()["kv"]
    assert (loaded["event"], loaded["kv_tokens"]) == ("loaded", kv["total_tokens"])
    assert listening["event"] == "listening"
    assert (addresses["page"], addresses["api"]) == (f"{server.url}/", f"{server.url}/v1")
    assert example["command"].startswith(f"curl {server.url}/v1/chat/completions -H")


def check_kill_9(server: Server) -> None:
    """Every request is answered; the job's output is complete, without doubles."""
    ends: dict[int, str] = {}
    batch = start_job(server, lines(40, ignore_eos=True, temperature=0))
    threads = [threading.Thread(target=ask, args=(server, i, ends)) for i in range(REQUESTS)]
    for thread in threads:
        thread.start()
    os.kill(server.engine_pid(), signal.SIGKILL)
    for thread in threads:
        thread.join(WAIT)
    assert sorted(ends) == list(range(REQUESTS))
    assert set(ends.values()) <= {"whole", "engine_down"}
    assert "whole" in ends.values()
    server.engine_ready(2)
    finished = ended(server.http, batch)
    assert finished["status"] == "completed"
    made = [json.loads(line) for line in output(server.http, finished).splitlines()]
    assert [one["custom_id"] for one in made] == [f"line-{i}" for i in range(40)] + [None]
    assert SECRET not in server.command.stderr


def check_sigterm(server: Server, state: Path) -> None:
    """The stream ends whole; the job is put down; both processes are gone."""
    batch = start_job(server, lines(60, max_tokens=200, ignore_eos=True))
    asked = {"prompt": SECRET, "max_tokens": 100, "ignore_eos": True, "stream": True}
    pid = server.engine_pid()
    with server.http.stream("POST", "/v1/completions", json=asked) as answer:
        parts = answer.iter_text()
        text = next(parts)
        os.kill(pid, signal.SIGTERM)  # as where a whole group of processes is told to end
        server.command.send(signal.SIGTERM)
        text += "".join(parts)
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    last = json.loads(events[-3].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"
    assert server.command.wait(WAIT).returncode == 0
    assert is_gone(pid)
    assert server.events()[-1]["event"] == "stopped"
    with contextlib.closing(sqlite3.connect(state / "server.db")) as db:
        status = db.execute("SELECT status FROM batches WHERE id = ?", (batch,)).fetchone()[0]
    assert status in ("validating", "in_progress")


def test_what_a_person_sees(tmp_path, tiny_model):
    """How to ask, each request, and the end; told twice to end, it does so at once."""
    prefix = tmp_path / "prefix.txt"
    prefix.write_text("You are kind. " * 3)
    command = Command(
        "serve", tiny_model, "--model", tiny_model, "--port", 0, "--state", tmp_path / "state",
        "--kv-memory", "2MiB", "--max-model-len", 1024, "--device", "cpu", "--dtype", "float32",
        "--app", f"kind={prefix}", "--log-format", "text", "--host", "0.0.0.0",
    )  # fmt: skip

    def lines() -> list[str]:
        """Without their times."""
        return [line[20:] for line in command.stderr.splitlines(keepends=True) if line[-1] == "\n"]

    def wait_for(start: str) -> str:
        command.until(lambda: any(line.startswith(start) for line in lines()), WAIT)
        return next(line for line in lines() if line.startswith(start))

    try:
        curl, url, _, header, _, body = shlex.split(wait_for("try: ").removeprefix("try: "))
        starts = [line.split(" ")[0] for line in lines()]
        assert starts == [
            "starting,", "model", "loading", "engine", "KV", "prefixes", "listening", "page", "try:"
        ]  # fmt: skip
        name, _, value = header.partition(": ")
        assert curl == "curl"
        assert httpx.post(url, content=body, headers={name: value}).status_code == 200
        assert wait_for("POST /v1/chat/completions length: ").split(", ")[1] == "40 answered"
        check_second_signal(command, url, lambda: wait_for("stopping: "))
    finally:
        command.send(signal.SIGKILL)
        command.wait(WAIT)


def check_second_signal(command: Command, url: str, wait: Callable[[], object]) -> None:
    """While a body is awaited, which holds the first one up."""
    host, port = url.split("/")[2].split(":")
    with socket.create_connection((host, int(port)), WAIT) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100")
        command.send(signal.SIGINT)
        wait()
        command.send(signal.SIGINT)
        done = command.wait(WAIT)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1][20:] == "warning: ended at once"
    assert "Traceback" not in done.stderr


LAUNCH = """
import asyncio, sys
from onestem.options import EngineOptions
from onestem.server.link.process import EngineProcess
from onestem.server.link.channel import read_message

async def main():
    link = await EngineProcess(EngineOptions(), "tests.server.fake_engine:load").launch()
    ready = await read_message(link.reader)
    print(ready.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_engine_ends_with_the_server():
    """However that ends: nothing is left to tell it."""
    with subprocess.Popen([sys.executable, "-c", LAUNCH], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert not is_gone(pid, seconds=0)
        server.kill()
        assert is_gone(pid)


LEAVE = """
import asyncio
from onestem.options import EngineOptions
from onestem.server.link.process import EngineProcess

async def main():
    link = await EngineProcess(EngineOptions(model="/no/such/model")).launch()
    link.writer.close()
    print(link.process.wait())

asyncio.run(main())
"""


def test_an_engine_whose_server_leaves_while_it_loads_ends_in_silence():
    ended = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, check=True)
    assert (ended.stdout, ended.stderr) == (b"0\n", b"")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--api-key-file", "/no/such/file"], "cannot read the key file"),
        (["--app", "x"], "expected NAME=FILE"),
        (["--log-level", "loud"], "expected debug"),
        (["--log-format", "x"], "expected text or json"),
        (["--allowed-hosts", "http://a"], "expected a name without port"),
        (["a", "--model", "b"], "the model is 'a', and --model is 'b'"),
        (["/no/such/model"], "no directory"),
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


def test_the_engine_of_a_shape_makes_weights_up(monkeypatch, tmp_path):
    """It is told the shape's directory, which alone would have to hold weights."""
    told = []

    def launch(options: EngineOptions, *, logs: object) -> EngineProcess:
        told.append(options)
        raise ConfigError("no engine in this test")

    monkeypatch.setattr("onestem.server.run.EngineProcess", launch)
    arguments = ["serve", "shape:nothing", "--port", "0", "--state", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["onestem", *arguments])
    with pytest.raises(SystemExit):
        main()
    (options,) = told
    assert (Path(options.model), options.random_weights) == (find_shape("nothing"), True)


def test_what_the_engine_logs_is_in_the_log(tmp_path, tiny_model):
    """As an object of its own, like all lines."""
    folder = tmp_path / "kv"
    with served(tmp_path / "state", tiny_model, "--disk-kv", folder) as server:
        folder.rmdir()
        folder.write_text("no folder")
        body = {"prompt": list(range(3, 253)), "max_tokens": 4}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        server.command.until(lambda: server.events("log"), WAIT)
        (said,) = server.events("log")
    assert (said["level"], said["logger"]) == ("warning", "onestem.cache.storage")
    assert said["message"] == f"disk_kv {folder} cannot be written: File exists"


@pytest.mark.parametrize("number", [soaked(signal.SIGTERM), signal.SIGKILL])
def test_a_restart_finds_prefixes_on_the_disk(tmp_path, tiny_model, number):
    """An engine that falls idle has written what it computed: a kill loses nothing of it."""
    disk = ("--disk-kv", tmp_path / "kv")
    body = {"prompt": list(range(3, 253)), "max_tokens": 4, "temperature": 0}
    answers = []
    for _ in range(2):
        with served(tmp_path / "state", tiny_model, *disk) as server:
            answers.append(server.http.post("/v1/completions", json=body).json())
            if answers[1:]:
                metrics = server.http.get("/metrics").text
                page = server.http.get("/internal/state").json()
            server.command.until(lambda: any((tmp_path / "kv").glob("*.safetensors")), WAIT)
            server.command.send(number)
            server.command.wait(WAIT)
    first, second = answers
    assert second["choices"] == first["choices"]
    assert "disk_tokens" not in first["usage"]["prompt_tokens_details"]
    details = second["usage"]["prompt_tokens_details"]
    assert (details["cached_tokens"], details["disk_tokens"]) == (249, 249)
    line = next(one for one in metrics.splitlines() if one.startswith("onestem_disk_prompt"))
    assert line.endswith(" 249.0")
    for shown in (page["totals"], page["requests"][0]):
        assert (shown["cached_tokens"], shown["host_tokens"], shown["disk_tokens"]) == (249, 0, 249)

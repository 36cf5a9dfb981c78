"""Batches over restarts of every kind of a server that is started as people start it: each is
whole, and equal to that of a run without any."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from onestem.jobs import run_file
from onestem.llm import LLM
from tests.forked import Command
from tests.server.test_batches import create, ended, output

WAIT = 90.0
LINES = 8


def lines(number: int) -> bytes:
    """Requests that are sampled, without a seed; a line that cannot be answered."""
    made = [
        {
            "custom_id": f"{number}-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"The mill of Oakham, {number}, {i % 3}: ", "max_tokens": 8},
        }
        for i in range(LINES)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in made) + b"not JSON\n"


class Server:
    """`onestem serve` without options that a job could depend on."""

    def __init__(self, state: Path, *more: object, signal_after=None) -> None:
        self.command = Command(
            "serve", "--port", 0, "--state", state, "--dtype", "float32", "--device", "cpu", *more,
            signal_after=signal_after,
        )  # fmt: skip
        self.command.until(lambda: bool(self.events("listening")), WAIT)
        url = self.events("listening")[0]["url"]
        self.http = httpx.Client(base_url=url, timeout=WAIT)

    def events(self, name: str) -> list[dict]:
        log = self.command.stderr
        events = map(json.loads, log[: log.rfind("\n") + 1].splitlines())
        return [event for event in events if event["event"] == name]

    def close(self) -> None:
        self.http.close()
        self.command.send(signal.SIGKILL)
        self.command.wait(WAIT)


def engine_pid(http: httpx.Client) -> int:
    return http.get("/internal/state").json()["engine"]["pid"]


@pytest.mark.soak
def test_a_batch_goes_on_with_its_own_bits_alone(tmp_path):
    """A server with other threads than those that a deterministic batch began with."""
    state, options = tmp_path / "state", ("--deterministic", "--kv-memory", "64MiB")
    with closing(
        Server(state, *options, "--threads", 1, signal_after=(LINES // 2, signal.SIGKILL))
    ) as server:
        batch_id = create(server.http, lines(0))["id"]
        server.command.until(lambda: False, WAIT)
    with closing(Server(state, *options, "--threads", 2)) as server:
        batch = ended(server.http, batch_id)
    assert batch["status"] == "failed"
    assert "bits was 1 threads" in batch["errors"]["data"][0]["message"]


@pytest.mark.soak
@pytest.mark.parametrize("ways", [(signal.SIGTERM, signal.SIGKILL, signal.SIGINT)])
def test_batches_over_restarts_of_every_kind(tmp_path, ways):
    state, count = tmp_path / "state", len(ways) + 1
    with closing(Server(state, "--kv-memory", "64MiB")) as server:
        ids = [create(server.http, lines(number))["id"] for number in range(count)]
        server.command.send(signal.SIGTERM)
        server.command.wait(WAIT)
    # Each server ends in the middle of a batch, at an answer of its own. The last one goes on
    # without its engine.
    for number, way in enumerate(ways):
        at = LINES // 2 + number, way
        memory = ("2MiB", "64MiB", "512KiB")[number]
        with closing(Server(state, "--kv-memory", memory, signal_after=at)) as server:
            server.command.until(lambda: False, WAIT)
    with closing(Server(state)) as server:
        os.kill(engine_pid(server.http), signal.SIGKILL)
        server.command.until(lambda: bool(server.events("job_completed")), WAIT)
        batches = [ended(server.http, batch_id) for batch_id in ids]
        assert [batch["status"] for batch in batches] == ["completed"] * count
        assert {batch["errors"] for batch in batches} == {None}
        made = [output(server.http, batch) for batch in batches]
    llm = LLM(device="cpu", dtype="float32", kv_memory="64MiB")
    for number, found in enumerate(made):
        source, target = tmp_path / "in.jsonl", tmp_path / f"{number}.jsonl"
        source.write_bytes(lines(number))
        run_file(llm, source, target)
        assert found == target.read_bytes()

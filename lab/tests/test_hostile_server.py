"""A server that the benchmark ends: what is cut is told apart, and memory is judged by lives."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from tokenizers import Tokenizer as HuggingFace

from onestem.engine.text.bounded import BoundedTokenizer
from onestem.engine.text.tokenizer import Tokenizer
from onestem_lab.load.client import open_client
from onestem_lab.load.server import free_port
from onestem_lab.serve.hostile_answers import Choice, Reply
from onestem_lab.serve.hostile_bodies import RUN_LENGTH
from onestem_lab.serve.hostile_hand import Hand, Site, Tally
from onestem_lab.serve.hostile_memory import family, growth, is_alive, is_flat
from onestem_lab.serve.hostile_model import make_model
from onestem_lab.serve.hostile_pool import Case
from onestem_lab.serve.hostile_probes import PHASES, Windows, fits
from onestem_lab.serve.hostile_requests import _expect_deleted, _use_and_delete
from onestem_lab.serve.hostile_schemas import small_schema
from onestem_lab.serve.hostile_server import ENGINE, KINDS, Outages, Restarts, Server
from onestem_lab.serve.hostile_setting import Setting
from tests.soak import soaked

# A server with an "engine": a process that ends with it, and is started again when it is gone.
# With the argument `stays`, its engine goes on without it.
PROGRAM = """
import json, signal, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, KIND = int(sys.argv[1]), sys.argv[2]
WAIT = "import sys; sys.stdin.read()" if KIND == "ends" else "import time; time.sleep(99)"
engines = []

def engine():
    if not engines or engines[-1].poll() is not None:
        engines.append(subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE))
    return {"pid": engines[-1].pid, "state": "running", "restarts": len(engines) - 1}

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"engine": engine()}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
end = lambda *_: threading.Thread(target=server.shutdown).start()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end)
server.serve_forever()
"""


@pytest.fixture(params=["ends", soaked("stays")])
def server(request, tmp_path) -> Iterator[tuple[Server, str]]:
    program = tmp_path / "server.py"
    program.write_text(PROGRAM)
    port = free_port()
    command = [sys.executable, str(program), str(port), request.param]
    server = Server(command, port, tmp_path / "log")
    try:
        yield server, request.param
    finally:
        server.close()


def test_each_end(server, monkeypatch):
    """Ended in each way, a server is there again, with another process; an engine that outlives
    it is a fault."""
    monkeypatch.setattr("onestem_lab.serve.hostile_server.LEAVE_SECONDS", 3.0)
    found = asyncio.run(end_in_all_ways(*server))
    kind, restarts, pids = found
    assert restarts.told()["by_kind"] == dict.fromkeys(KINDS, 1)
    assert len(restarts.ended) == len(restarts.told()["outage_seconds"]) == len(KINDS)
    assert len(set(pids)) == 1 + len(KINDS) - 1  # its engine alone leaves the server as it is
    faulty = [] if kind == "ends" else [one for one in KINDS if one != ENGINE]
    assert [one["kind"] for one in restarts.bad] == faulty
    assert not restarts.outages.is_on


async def end_in_all_ways(server: Server, kind: str) -> tuple[str, Restarts, list[int]]:
    async def tidy() -> None:
        assert restarts.outages.is_on

    await server.start()
    pids = [server.pid]
    async with open_client(server.url, "key", 10.0) as operator:
        restarts = Restarts(server, Outages(), operator, tidy)
        for one in KINDS:
            await restarts.once(one)
            pids.append(server.pid)
    return kind, restarts, pids


# ----------------------------------------------------------------------------- what is cut


def hand_of(site: Site, tally: Tally, began: float) -> Hand:
    return Hand(site, [], tally, random.Random(0), {}, "ask", "alice", 1.0, began)


@pytest.mark.parametrize(
    ("kind", "excused"),
    [("SIGKILL", {"error", "engine down"}), (ENGINE, {"engine down"})],
)
def test_what_is_cut(kind, excused):
    """Errors near an outage are its own; what is wrong or hangs never is."""
    site, tally = Site("", {}, {}, 1), Tally()
    outcomes = ("error", "engine down", "wrong", "hung", "right")
    began = time.monotonic()
    with site.outages.outage(kind):
        for outcome in outcomes:
            hand_of(site, tally, began).note(outcome)
    assert tally.count("cut") == len(excused)
    assert {one for one in outcomes if not tally.count(one)} == excused
    # What began when it was over has no excuse, nor has what ends long after it.
    hand_of(site, tally, time.monotonic()).note("engine down")
    name, begin, end = site.outages.spans[0]
    site.outages.spans[0] = (name, begin - 60, end - 60)
    hand_of(site, tally, began - 60).note("engine down")
    assert tally.count("engine down") == 2


@pytest.mark.parametrize("is_near", [True, False])
def test_what_an_outage_has_deleted_is_cut(is_near):
    """An object that is gone after an outage, however long after."""
    site, tally = Site("", {}, {}, 1), Tally()
    site.outages.spans.append(("SIGKILL", time.monotonic() - 100, time.monotonic() - 50))
    hand = hand_of(site, tally, time.monotonic() - (60 if is_near else 40))
    _expect_deleted(hand, httpx2.Response(404))
    _expect_deleted(hand, httpx2.Response(200))
    assert tally.counts == {"ask": {"cut" if is_near else "error": 1, "200": 1}}


def test_a_question_ends_with_its_action():
    """Where the deletion of what it uses fails, a question is not left alone."""
    ended = asyncio.run(ask_of_a_server_that_ends())
    assert ended == ["asked"]


async def ask_of_a_server_that_ends() -> list[str]:
    ended = []

    async def answer(request: httpx2.Request) -> httpx2.Response:
        if request.method == "DELETE":
            raise httpx2.ConnectError("gone")
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            ended.append("asked")

    async with httpx2.AsyncClient(
        base_url="http://server", transport=httpx2.MockTransport(answer)
    ) as http:
        hand = hand_of(Site("", {}, {"alice": http}, 1), Tally(), time.monotonic())
        case = Case(number=0, kind="short", names=(), path="/v1/completions", body={})
        with pytest.raises(httpx2.ConnectError):
            await _use_and_delete(hand, case, {}, "/v1/schemas/s")
        assert len(asyncio.all_tasks()) == 1
    return ended


# ----------------------------------------------------------------------------- memory

MIB = 1 << 20


def looks_of(
    engine: list[int], pids: list[int] | None = None, kv: float = 0.0, grammars: int = 0
) -> list[dict]:
    return [
        {
            "at": 60.0 * i,
            "server_pid": 1,
            "engine_pid": pids[i] if pids else 2,
            "server_rss": 500 * MIB,
            "engine_rss": rss * MIB,
            "children_rss": (i % 3) * 100 * MIB,
            "kv_taken": kv * i / len(engine),
            "grammar_bytes": grammars * i * MIB,
        }
        for i, rss in enumerate(engine)
    ]


@pytest.mark.parametrize(
    ("engine", "kv", "grammars", "flat"),
    [
        ([500, 800, 900, 950, 960, 960, 970, 970], 0.0, 0, True),
        ([1000 + 40 * i for i in range(8)], 0.0, 0, False),
        # All of that is KV memory, or grammars.
        ([1000 + 40 * i for i in range(8)], 1.0, 0, True),
        ([1000 + 40 * i for i in range(8)], 0.0, 40, True),
    ],
)
def test_growth(engine, kv, grammars, flat):
    found = growth(looks_of(engine, kv=kv, grammars=grammars), 320 * MIB, 60.0)
    assert found["engine"]["flat"] is flat
    assert found["server"]["flat"] is found["children"]["flat"] is True
    assert is_flat(found) is flat


def test_growth_of_a_life():
    """Restarts do not hide it; a life that is too short is not judged."""
    engine = [100, 200, 300, *(1000 + 40 * i for i in range(8))]
    looks = looks_of(engine, [1, 1, 1, *[2] * 8])
    assert growth(looks, 0, 60.0)["engine"]["flat"] is False
    short = growth(looks, 0, 3600.0)
    assert short["engine"]["flat"] is None
    assert short["engine"]["growth"] > 0.05
    assert is_flat(short)


def test_families():
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '99']).pid, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{child}; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        assert family(process.pid) == [grandchild]
        assert {process.pid, grandchild} <= set(family(os.getpid()))
        os.kill(grandchild, 9)
        process.kill()
        while is_alive(process.pid):
            pass
    assert not is_alive(process.pid)


# ----------------------------------------------------------------------------- the rest


def test_windows():
    windows = Windows(100.0, 10.0)
    phases = [windows.phase(at) for at in (100, 109, 110, 119, 120, 130, 140)]
    assert phases == [PHASES[i] for i in (0, 0, 1, 1, 2, 1, 2)]
    assert Windows(100.0, 0).phase(1e6) == PHASES[0]


def test_small_schemas():
    def reply(text: str) -> Reply:
        return Reply(status=200, choices=[Choice(exact={"text": text})])

    assert small_schema(1) != small_schema(2)
    assert fits(reply('{"k1":"a"}'), small_schema(1))
    for text in ('{"k2":"a"}', '{"k1":"c"}', '{"k1":"a","k2":"a"}', '{"k1', "[]"):
        assert not fits(reply(text), small_schema(1))


def test_the_model_takes_blanks_in_runs(tmp_path: Path):
    """As Qwen's tokenizer does: the last blank belongs to what follows."""
    tokenizer = Tokenizer.from_directory(make_model(tmp_path / "model"))
    assert tokenizer.decode(tokenizer.encode("a   the\n\n b")) == "a   the\n\n b"
    pre_tokenizer = HuggingFace.from_file(str(tmp_path / "model" / "tokenizer.json")).pre_tokenizer
    pieces = pre_tokenizer.pre_tokenize_str("a   the\n\n b")
    assert [span for _, span in pieces] == [(0, 1), (1, 3), (3, 7), (7, 9), (9, 11)]
    # Long texts reach it.
    BoundedTokenizer(tokenizer, Setting().max_model_len).check("prompt", RUN_LENGTH + 1)

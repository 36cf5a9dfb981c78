"""What a chunk of a stream, and a first token, cost the HTTP process in CPU time.

    python -m onestem_lab.serve.chunks [--streams 64] [--seconds 5] [--rounds 5] [--before DIR]
        [--kinds chat,completion]

The engine process is one that sends tokens at a fixed pace and computes nothing, the clients are a
process that counts the events of raw sockets. The pace is below the one at which chunks grow, so
that each token is a chunk. CPU seconds are those of the HTTP process alone, so that what else the
machine does hardly matters. `tools`: a chat whose answers are read for calls (asked: 0.8 of a
plain chat's chunks); `messages`, `responses`: the same through the other APIs. `--before`: a
clone at another version, which may lack some kinds; both run in turns, and medians are compared.
First tokens are those of requests one after the other, each of which is left there. Written to
lab/results/serve-chunks.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from onestem_lab.results import RESULTS, ROOT, machine, write

RESULT = RESULTS / "serve-chunks.json"
USER = [{"role": "user", "content": "Hello"}]
FUNCTION = {"name": "look_up", "parameters": {"type": "object", "properties": {}}}
TOOL = {"name": "look_up", "input_schema": FUNCTION["parameters"]}
# Each kind's path, and its body beside what all have.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": USER}),
    "completion": ("completions", {"prompt": [1, 2, 3]}),
    "tools": (
        "chat/completions",
        {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]},
    ),
    "messages": ("messages", {"messages": USER, "tools": [TOOL]}),
    "responses": ("responses", {"input": "Hello", "tools": [{"type": "function", **FUNCTION}]}),
}
WHAT = ("chunks per CPU second", "CPU ms of a first token")
REQUESTS = 100
Found = dict[str, dict[str, dict[str, list[float]]]]
PACE = 7000  # tokens a second, of all streams: below CHUNKS_PER_SECOND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, metavar="DIR")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(_serve(options.profile))
        return
    versions = {"now": ROOT} | ({"before": options.before} if options.before else {})
    kinds = options.kinds.split(",")
    found: Found = {
        name: {what: {kind: [] for kind in kinds} for what in WHAT} for name in versions
    }
    for turn in range(options.rounds):
        for name, folder in versions.items():
            for kind in kinds:
                measured = _measure(folder, kind, options)
                for what, each in zip(WHAT, measured or (), strict=measured is not None):
                    found[name][what][kind].append(each)
                    print(f"{turn} {name:6} {kind:10} {each:9.2f} {what}", flush=True)
    result: dict[str, Any] = {
        "command": f"python -m onestem_lab.serve.chunks --streams {options.streams} "
        f"--seconds {options.seconds:g} --rounds {options.rounds} --kinds {options.kinds}",
        "machine": machine(),
        "found": found,
        "of_chat": _ratios(found["now"], lambda what, _: found["now"][what]["chat"]),
    }
    if options.before:
        result["of_before"] = _ratios(found["now"], lambda what, kind: found["before"][what][kind])
    for name in ("of_chat", "of_before"):
        print(name, result.get(name))
    if not options.profile:
        write(RESULT, result)


def _ratios(
    found: dict[str, dict[str, list[float]]], others: Callable[[str, str], list[float]]
) -> dict[str, dict[str, float]]:
    """Medians of the ratios of each round, by what is measured and by kind."""
    return {
        what: {
            kind: median(a / b for a, b in zip(all_, others(what, kind), strict=True))
            for kind, all_ in kinds.items()
            if others(what, kind)
        }
        for what, kinds in found.items()
    }


# ----------------------------------------------------------------------------- clients


def _measure(folder: Path, kind: str, options: argparse.Namespace) -> tuple[float, float] | None:
    """What `WHAT` names, by CPU time of the process that sent it; None: a version has no such
    route."""
    command = [sys.executable, "-m", "onestem_lab.serve.chunks", "--serve"]
    if options.profile:
        command += ["--profile", str(options.profile)]
    found_in = os.pathsep.join([str(folder), str(ROOT / "lab"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": found_in}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=folder,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with _ask(port, kind) as stream:
            is_there = b" 200 " in stream.recv(1 << 16)
        if not is_there:
            server.kill()
            return None
        cpu = _first_tokens(server, port, kind)
        sockets = [_ask(port, kind) for _ in range(options.streams)]
        counts = [0] * len(sockets)
        threading.Thread(target=_count, args=(sockets, counts), daemon=True).start()
        while not all(counts):
            time.sleep(0.1)
        time.sleep(1.0)
        began, chunks = _told(server), sum(counts)
        time.sleep(options.seconds)
        seconds, chunks = _told(server) - began, sum(counts) - chunks
        server.stdin.close()
        server.wait()
    if chunks < 0.8 * PACE * options.seconds:
        print(f"  {chunks / options.seconds:.0f} chunks/s of {PACE}: the machine was busy")
    return chunks / seconds, 1000 * cpu / REQUESTS


def _first_tokens(server: subprocess.Popen[str], port: int, kind: str) -> float:
    """CPU seconds of requests up to their first tokens, after as many that warm it."""
    began = 0.0
    for number in range(2 * REQUESTS):
        if number == REQUESTS:
            began = _told(server)
        with _ask(port, kind) as stream:
            data = b""
            while b"data: " not in data:
                data += stream.recv(1 << 16)
    return _told(server) - began


def _told(server: subprocess.Popen[str]) -> float:
    """The server's CPU seconds."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("cpu\n")
    server.stdin.flush()
    return float(server.stdout.readline())


def _ask(port: int, kind: str) -> socket.socket:
    path, own = KINDS[kind]
    limit = "max_output_tokens" if kind == "responses" else "max_tokens"
    data = json.dumps({limit: 1_000_000, "stream": True, **own}).encode()
    stream = socket.create_connection(("127.0.0.1", port))
    stream.sendall(
        f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return stream


def _count(sockets: list[socket.socket], counts: list[int]) -> None:
    import selectors

    with selectors.DefaultSelector() as waiting:
        for number, stream in enumerate(sockets):
            stream.setblocking(False)
            waiting.register(stream, selectors.EVENT_READ, number)
        while waiting.get_map():
            for key, _ in waiting.select():
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                counts[key.data] += data.count(b"data: ")
                if not data:
                    waiting.unregister(key.fileobj)


# ----------------------------------------------------------------------------- server


class Engine:
    """Speaks as the engine process does: a token for each stream, at a pace."""

    async def launch(self) -> Any:
        from onestem.server.link.process import connect

        ours, theirs = socket.socketpair()
        threading.Thread(target=self._run, args=(theirs,), daemon=True).start()
        self.reader, self.writer = await connect(ours, None)
        return self

    def kill(self) -> None:
        self.writer.close()

    async def end(self) -> str:
        return "ended"

    def _run(self, end: socket.socket) -> None:
        command = [sys.executable, "-m", "onestem_lab.serve.paced_engine", str(end.fileno())]
        subprocess.run(command, pass_fds=[end.fileno()], check=False)


async def _serve(profile: Path | None) -> None:
    from onestem.engine.text.tokenizer import Tokenizer
    from onestem.models.find import find_model
    from onestem.options import EMBEDDED
    from onestem.server.run import HttpServer, bind
    from onestem.server.service import Service
    from onestem.server.settings import Settings

    path = find_model(EMBEDDED)
    with tempfile.TemporaryDirectory() as state:
        settings = Settings(state=state, grace=0, timeout=3600)
        service = Service(settings, path, Tokenizer.from_directory(path), Engine())
        await service.start()
        listener = bind("127.0.0.1", 0)
        server = HttpServer(service)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        print(listener.getsockname()[1], flush=True)
        profiler = None
        if profile is not None:
            import cProfile

            profiler = cProfile.Profile()
            profiler.enable()
        while await asyncio.to_thread(sys.stdin.readline):
            usage = resource.getrusage(resource.RUSAGE_SELF)
            print(usage.ru_utime + usage.ru_stime, flush=True)
        if profiler is not None:
            profiler.disable()
            profiler.dump_stats(profile)
        server.begin_to_stop()
        serving.cancel()
        os._exit(0)


if __name__ == "__main__":
    main()

"""What a chunk of a stream, and a first token, cost the HTTP process in CPU time.

    python -m onestem_lab.serve.chunks [--streams 64] [--steps 100] [--turns 5] [--starts 20]
        [--before DIR] [--kinds chat,completion]

The engine process is one that sends tokens and computes nothing: a request gets its first token at
once, and `--steps` more in a turn, as fast as they are taken. Each token is a chunk at any rate; in
a server, chunks grow with it. The client has raw sockets and reads now and then, so that no chunk
wakes it up. CPU time is that of the HTTP process alone, which has a core of its own.

What that does in a second changes by a third from minute to minute. So one process has streams of
all kinds open, which stand still but for one kind's, and a turn has all kinds, in random order. A
ratio is of one turn; given are the median of all and the ends of the 95% interval that their ranks
give it. Processes of one version differ by a tenth, by where their memory lies, so all are started
`--starts` times. `--before`: a clone at another version, whose process takes part in each turn.

`tools`: a chat whose answers are read for calls (asked: 0.8 of a plain chat's chunks); `messages`,
`responses`: the same through the other APIs. First tokens are those of requests one after the
other, each of which is left there. Written to lab/results/serve-chunks.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from onestem_lab.results import RESULTS, ROOT, commit_of, machine, write

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
LANES = {kind: lane for lane, kind in enumerate(KINDS)}  # streams that get tokens together
LEFT = len(LANES)  # the lane of requests that are left at their first token
LIMIT = 1_000_000  # tokens of a request, and its lane
REQUESTS = 8  # for first tokens, in a turn
READ_SECONDS = 0.02  # between reads of the client
WHAT = ("CPU us of a chunk", "CPU ms of a first token", "ms of a first token")
Values = dict[tuple[str, str, str], list[float]]  # by version, kind and what is measured
CPUS = sorted(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5, help="of each start")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--before", type=Path, metavar="DIR")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--serve", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(_serve(options.serve, options.steps, options.profile))
        return
    os.sched_setaffinity(0, CPUS[-1:])
    folders = {"now": ROOT} | ({"before": options.before} if options.before else {})
    values: Values = defaultdict(list)
    for _ in range(options.starts):
        sizes = _start(folders, options, values)
    found: dict[str, Any] = {}
    for (name, kind), size in sizes.items():
        made = {what: median(values[name, kind, what]) for what in WHAT}
        a_second = {"chunks per CPU second": 1e6 / made[WHAT[0]], "bytes of a chunk": size}
        found.setdefault(name, {})[kind] = made | a_second
    result: dict[str, Any] = {
        "command": "python -m onestem_lab.serve.chunks "
        f"--streams {options.streams} --steps {options.steps} --turns {options.turns} "
        f"--starts {options.starts} --kinds {options.kinds}",
        "machine": machine(),
        "versions": {name: commit_of(folder, "") for name, folder in folders.items()},
        "found": found,
    }
    for of, version, only in (("of_chat", "now", "chat"), ("of_before", "before", None)):
        result[of] = {
            what: {
                kind: ratio(values[version, only or kind, what], values["now", kind, what])
                for kind in found["now"]
                if (only or kind) in found.get(version, ())
            }
            for what in WHAT
        }
    print(json.dumps(result, indent=1))
    if not options.profile:
        write(RESULT, result)


def _start(
    folders: dict[str, Path], options: argparse.Namespace, values: Values
) -> dict[tuple[str, str], int]:
    """Start each version's server and add what it measures; the first turn only warms. Returns the
    bytes of a chunk, by version and kind."""
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(Server(folder, options)) for name, folder in folders.items()
        }
        lanes = [
            (name, kind)
            for name, server in servers.items()
            for kind in options.kinds.split(",")
            if server.open(kind)
        ]
        for turn in range(-1, options.turns):
            random.shuffle(lanes)
            made = {(name, kind): [servers[name].chunk(kind)] for name, kind in lanes}
            for name, kind in lanes:
                made[name, kind] += servers[name].first_token(kind)
                for what, value in zip(WHAT, made[name, kind], strict=True):
                    if turn >= 0:
                        values[name, kind, what].append(value)
        return {(name, kind): servers[name].bytes_of(kind) for name, kind in sorted(lanes)}


def ratio(costs: Sequence[float], others: Sequence[float]) -> list[float]:
    """How much more a CPU second buys at `others` than at `costs`, turn by turn: the low end of the
    95% interval of the median, the median, the high end."""
    each = sorted(a / b for a, b in zip(costs, others, strict=True))
    rank = max(0, math.floor(len(each) / 2 - 0.98 * math.sqrt(len(each))))
    return [round(value, 4) for value in (each[rank], median(each), each[-1 - rank])]


# ----------------------------------------------------------------------------- clients


class Server:
    """The server of a version, with streams of each kind that was opened.

    Args:
        folder: the version's clone.
    """

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._streams: dict[str, list[socket.socket]] = defaultdict(list)
        self._chunks, self._bytes = Counter[str](), Counter[str]()

    def __enter__(self) -> Server:
        with tempfile.TemporaryDirectory() as folder:
            orders = Path(folder, "orders")
            os.mkfifo(orders)
            command = [sys.executable, "-m", "onestem_lab.serve.chunks", "--serve", str(orders)]
            command += ["--steps", str(self._options.steps)]
            if self._options.profile is not None:
                command += ["--profile", str(self._options.profile)]
            found_in = [str(self._folder), str(ROOT / "lab"), os.environ.get("PYTHONPATH", "")]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=self._folder, text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(found_in)},
            )  # fmt: skip
            assert self._process.stdout is not None
            self._port = int(self._process.stdout.readline())
            self._orders = orders.open("wb", buffering=0)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def open(self, kind: str) -> bool:
        """Open streams; False: this version has no such route."""
        with self._ask(kind, LEFT) as stream:
            if b" 200 " not in stream.recv(1 << 16):
                return False
        for _ in range(self._options.streams):
            stream = self._ask(kind, LANES[kind])
            self._until_data(stream)
            stream.setblocking(False)
            self._streams[kind].append(stream)
        return True

    def chunk(self, kind: str) -> float:
        """CPU microseconds of a chunk in a turn of a kind's streams."""
        began, before = self._cpu, self._chunks[kind]
        self._orders.write(bytes([LANES[kind]]))
        while not self._read():
            time.sleep(READ_SECONDS)
        self._rest()
        took, num_chunks = self._cpu - began, self._chunks[kind] - before
        if num_chunks < 0.87 * self._options.steps * self._options.streams:
            raise RuntimeError(f"{kind}: {num_chunks} chunks: some have several tokens")
        return 1e6 * took / num_chunks

    def first_token(self, kind: str) -> tuple[float, float]:
        """Milliseconds of a request up to its first token: CPU time, and time."""
        began, took = self._cpu, 0.0
        for _ in range(REQUESTS):
            asked = time.perf_counter()
            with self._ask(kind, LEFT) as stream:
                self._until_data(stream)
                took += time.perf_counter() - asked
        self._rest()
        return 1e3 * (self._cpu - began) / REQUESTS, 1e3 * took / REQUESTS

    def bytes_of(self, kind: str) -> int:
        """Bytes of a chunk, with its framing."""
        return round(self._bytes[kind] / self._chunks[kind])

    @property
    def _cpu(self) -> float:
        """CPU seconds of the process: Linux has a clock of each."""
        return time.clock_gettime(~self._process.pid << 3 | 2)

    def _rest(self) -> None:
        """Read what comes until the process has nothing to do."""
        before = 0.0
        while self._read() or self._cpu > before + READ_SECONDS / 10:
            before = self._cpu
            time.sleep(READ_SECONDS)

    def _read(self) -> int:
        """Read what has come for the streams; the number of bytes."""
        num_bytes = self._bytes.total()
        for kind, streams in self._streams.items():
            for stream in streams:
                with contextlib.suppress(BlockingIOError):
                    data = stream.recv(1 << 20)
                    self._chunks[kind] += data.count(b"data: ")
                    self._bytes[kind] += len(data)
        return self._bytes.total() - num_bytes

    def _ask(self, kind: str, lane: int) -> socket.socket:
        path, own = KINDS[kind]
        limit = "max_output_tokens" if kind == "responses" else "max_tokens"
        data = json.dumps({limit: LIMIT + lane, "stream": True, **own}).encode()
        stream = socket.create_connection(("127.0.0.1", self._port))
        stream.sendall(
            f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        return stream

    def _until_data(self, stream: socket.socket) -> None:
        data = b""
        while b"data: " not in data:
            data += stream.recv(1 << 16)


# ----------------------------------------------------------------------------- server


class Engine:
    """Speaks as the engine process does (see `instant_engine`).

    Args:
        orders: a pipe with a byte for each turn: the lane.
        steps: of a turn.
    """

    def __init__(self, orders: Path, steps: int) -> None:
        self._arguments = [str(orders), str(steps)]

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
        command = [sys.executable, "-m", "onestem_lab.serve.instant_engine", str(end.fileno())]
        subprocess.run([*command, *self._arguments], pass_fds=[end.fileno()], check=False)


async def _serve(orders: Path, steps: int, profile: Path | None) -> None:
    from onestem.engine.text.tokenizer import Tokenizer
    from onestem.models.find import find_model
    from onestem.options import EMBEDDED
    from onestem.server.link import chunk_size
    from onestem.server.run import HttpServer, bind
    from onestem.server.service import Service
    from onestem.server.settings import Settings

    chunk_size.CHUNKS_PER_SECOND = 1_000_000_000
    path = find_model(EMBEDDED)
    with tempfile.TemporaryDirectory() as state:
        settings = Settings(state=state, grace=0, timeout=36000)
        service = Service(settings, path, Tokenizer.from_directory(path), Engine(orders, steps))
        await service.start()
        os.sched_setaffinity(0, CPUS[:1])
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
        await asyncio.to_thread(sys.stdin.read)
        if profiler is not None:
            profiler.disable()
            profiler.dump_stats(profile)
        server.begin_to_stop()
        serving.cancel()
        os._exit(0)


if __name__ == "__main__":
    main()

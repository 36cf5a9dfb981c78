"""The server's processes: ended in every way under way, and started again with the same state."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from onestem.errors import ConfigError
from onestem_lab.serve.hostile_memory import family, is_alive

__all__ = ["ENGINE", "KINDS", "Outages", "Restarts", "Server"]

Json = dict[str, Any]

ENGINE = "SIGKILL of the engine"
KINDS = ("SIGTERM", "SIGKILL", "SIGINT", ENGINE)  # in turn
SLACK_SECONDS = 5.0  # after an outage, within which its errors come
READY_SECONDS, END_SECONDS, LEAVE_SECONDS = 300.0, 120.0, 30.0


class Outages:
    """When the benchmark had ended the server or its engine itself. What is cut then is expected.

    Attributes:
        spans: kind, begin and end of each, in seconds of `time.monotonic`.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []

    @contextmanager
    def outage(self, kind: str) -> Iterator[None]:
        begin = time.monotonic()
        self.spans.append((kind, begin, float("inf")))
        try:
            yield
        finally:
            self.spans[-1] = (kind, begin, time.monotonic())

    @property
    def is_on(self) -> bool:
        return bool(self.spans) and self.spans[-1][2] == float("inf")

    def was_on(self, since: float) -> bool:
        """Whether one of them ended then or later, or is on."""
        return any(since <= end for _, _, end in self.spans)

    def excuses(self, outcome: str, began: float) -> bool:
        """Whether what began then and ends now so badly was cut by one of them. Without its engine
        a server still answers, with the error that says so; nothing excuses what hangs or is wrong.
        """
        now = time.monotonic()
        near = [kind for kind, _, end in self.spans if began <= end and now <= end + SLACK_SECONDS]
        excused = {"engine down"} if set(near) == {ENGINE} else {"engine down", "error"}
        return bool(near) and outcome in excused


class Server:
    """A server with its own group of processes.

    Args:
        command: starts it on the port; the same each time.
        log: its output, of all starts.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command, self._log = list(command), log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Until it takes requests; raises `ConfigError` where it does not."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=output,
                start_new_session=True,
                # With traces, the tokenizer's first panic keeps 57 MB of its library's symbols.
                env={**os.environ, "RUST_BACKTRACE": "0"},
            )
        limit = time.monotonic() + READY_SECONDS
        while not await self.is_healthy():
            if not self.is_alive or time.monotonic() > limit:
                raise ConfigError(f"the server does not start: see {self._log}")
            await asyncio.sleep(0.1)

    async def is_healthy(self) -> bool:
        try:
            async with httpx2.AsyncClient(base_url=self.url, timeout=5.0, trust_env=False) as http:
                return (await http.get("/health")).status_code == 200
        except httpx2.HTTPError:
            return False

    async def end(self, name: str) -> int | None:
        """End it by a signal; its exit code, None where SIGKILL had to follow."""
        assert self._process is not None
        self._process.send_signal(signal.Signals[name])
        try:
            return await asyncio.to_thread(self._process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            return None

    def close(self) -> None:
        """End all that is left of it."""
        if self._process is not None:
            for pid in [self._process.pid, *family(self._process.pid)]:
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()


@dataclass
class Restarts:
    """Ends the server or its engine from time to time, and starts it again.

    Args:
        tidy: called while each outage is still on, once the server takes requests again.

    Attributes:
        counts: how often, by kind; bad: what went wrong with it.
        ended: process ids of engines that ended for this.
        kills_of_this_server: how often its engine alone was ended since its start.
    """

    server: Server
    outages: Outages
    operator: httpx2.AsyncClient
    tidy: Callable[[], Awaitable[None]]
    counts: Counter[str] = field(default_factory=Counter)
    bad: list[Json] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    kills_of_this_server: int = 0

    async def go_on(self, wait: Callable[[], Awaitable[bool]]) -> None:
        """One after the other, as long as `wait` says that it is time for one."""
        for kind in itertools.cycle(KINDS):
            if not await wait():
                return
            await self.once(kind)

    async def once(self, kind: str) -> None:
        engine = (await self._engine())["pid"]
        with self.outages.outage(kind):
            self.counts[kind] += 1
            self.ended.add(engine)
            if kind == ENGINE:
                await self._end_engine(engine)
            else:
                await self._end_server(kind)
            await self.tidy()

    async def _end_engine(self, engine: int) -> None:
        self.kills_of_this_server += 1
        os.kill(engine, signal.SIGKILL)
        limit = time.monotonic() + READY_SECONDS
        while time.monotonic() < limit:
            now = await self._engine()
            if now["pid"] not in (None, engine) and now["state"] == "running":
                return
            await asyncio.sleep(0.1)
        self.note(ENGINE, "no other engine came")

    async def _engine(self) -> Json:
        """What the server says of its engine, once it says so."""
        while True:
            answer = await self.operator.get("/internal/state")
            if answer.status_code == 200:
                engine: Json = answer.json()["engine"]
                return engine
            await asyncio.sleep(0.1)

    async def _end_server(self, kind: str) -> None:
        others = family(self.server.pid)
        code = await self.server.end(kind)
        wanted = -signal.SIGKILL if kind == "SIGKILL" else 0
        if code != wanted:
            self.note(kind, f"exit code {code}" if code is not None else "it did not end")
        self.kills_of_this_server = 0
        await self.server.start()
        if left := await _left(others):
            self.note(kind, f"{len(left)} of its processes went on")

    def note(self, kind: str, what: str) -> None:
        self.bad.append({"kind": kind, "number": self.counts.total(), "what": what})

    def told(self) -> Json:
        """For the result."""
        spans = [end - begin for _, begin, end in self.outages.spans]
        return {
            "by_kind": {kind: self.counts[kind] for kind in KINDS},
            "outage_seconds": [round(seconds, 1) for seconds in spans],
            "bad": self.bad,
        }


async def _left(pids: Sequence[int]) -> list[int]:
    """Those that are still there after a while, which are ended then."""
    limit = time.monotonic() + LEAVE_SECONDS
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < limit:
        await asyncio.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left

"""A whole server inside the test: HTTP in one thread, the engine in another, a socket between."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from onestem.engine.text.tokenizer import Tokenizer
from onestem.llm import LLM
from onestem.models.find import find_model
from onestem.options import EngineOptions
from onestem.server.link.channel import Channel
from onestem.server.link.process import EngineProcess, connect
from onestem.server.link.worker import Worker
from onestem.server.run import HttpServer, bind
from onestem.server.service import Service
from onestem.server.settings import Settings

WAIT = 30.0
ENGINE = {"kv_memory": "256MiB", "device": "cpu", "dtype": "float32"}


class EngineThread:
    """Runs the worker in a thread. `kill` is what a SIGKILL is to the server: the socket closes.

    Args:
        change: called with each new `LLM`, to slow its engine down, say.

    Attributes:
        finished: request id -> sequence -> token ids, as the engine gave them.
    """

    def __init__(
        self, options: EngineOptions, change: Callable[[LLM], object] = lambda llm: None
    ) -> None:
        self.options = options
        self.llms: list[LLM] = []
        self.finished: dict[str, dict[int, list[int]]] = {}
        self._change = change
        self._ends: list[socket.socket] = []

    def _record(self, llm: LLM) -> None:
        """Remember what the engine says of requests that have finished."""
        step = llm.engine.step_news

        def recorded():
            outputs, going_on = step()
            for output in outputs:
                if output.finished:
                    self.finished[output.request_id] = {
                        o.index: o.token_ids for o in output.outputs
                    }
            return outputs, going_on

        llm.engine.step_news = recorded

    async def launch(self):
        ours, theirs = socket.socketpair()
        llm = await asyncio.to_thread(LLM.from_options, self.options)
        self._record(llm)
        self._change(llm)
        self.llms.append(llm)
        self._ends.append(ours)
        channel = Channel(theirs)
        thread = threading.Thread(target=self._run, args=(llm, channel), daemon=True)
        thread.start()
        reader, writer = await connect(ours, ("", {}))
        return _Link(thread, channel, reader, writer)

    def _run(self, llm: LLM, channel: Channel) -> None:
        channel.receive()
        try:
            Worker(llm.engine, channel, leave=lambda: None).run()
        except OSError:
            pass  # the server closed the socket before the last report
        finally:
            channel.close()

    def kill(self) -> None:
        self._ends[-1].shutdown(socket.SHUT_RDWR)


class Held:
    """Holds an engine's steps up, so that a test finds it half done: pass it as `change`."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._engines = 0
        self._limit = 0.0
        self.finished = 0

    def __call__(self, llm: LLM) -> None:
        step = llm.engine.step_news
        self._engines += 1
        number = self._engines

        def held() -> tuple:
            with self._change:
                self._change.wait_for(
                    lambda: number < self._engines or self.finished < self._limit, WAIT
                )
            outputs, going_on = step()
            self.finished += len(outputs)
            return outputs, going_on

        llm.engine.step_news = held

    def let(self, count: float) -> None:
        """Let steps pass until so many requests have finished in all."""
        with self._change:
            self._limit = count
            self._change.notify_all()

    def forget(self) -> None:
        """The engine was killed: its thread may run into its end."""
        with self._change:
            self._engines += 1
            self._change.notify_all()


class _Link:
    def __init__(self, thread, channel, reader, writer) -> None:
        self.thread, self.channel, self.reader, self.writer = thread, channel, reader, writer

    def kill(self) -> None:
        self.writer.close()

    async def end(self) -> str:
        self.writer.close()
        await asyncio.to_thread(self.thread.join, WAIT)
        return "the thread ended"


class Running:
    """A server that answers.

    Attributes:
        url: its root; service: what it is made of.
    """

    def __init__(self, settings: Settings, path: Path, launcher: EngineProcess) -> None:
        self.launcher = launcher
        self.settings = settings
        self._path = path
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self.listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        assert self._ready.wait(WAIT)
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        tokenizer = Tokenizer.from_directory(self._path)
        self.service = Service(self.settings, self._path, tokenizer, self.launcher)
        await self.service.start()
        self.server = HttpServer(self.service)
        serving = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        while not self.server.started:
            await asyncio.sleep(0.005)
        self._ready.set()
        try:
            await serving
        finally:
            await self.service.stop()

    def on_loop(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run a coroutine function (or a function) on the server's loop."""

        async def run() -> Any:
            result = call(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.begin_to_stop)
            self._thread.join(WAIT)
            assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def http(self, key: str | None = None, **options: Any) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=WAIT, **options)

    def check(self) -> dict[str, Any]:
        """The engine's books when nothing runs; only pinned prefixes are held."""
        self.until(lambda: not len(self.service.client.requests))
        books = self.on_loop(self.service.client.ask, "check")
        assert books["error"] is None
        assert books["free"] + books["cached"] == books["total"]
        assert books["running"] == books["waiting"] == 0
        self.until(lambda: not self.service.client.supervisor.watchdog.owes)
        return books

    def until(self, condition: Callable[[], bool]) -> None:
        """Let the server go on until something holds."""

        async def wait() -> None:
            async with asyncio.timeout(WAIT):
                while not condition():
                    await asyncio.sleep(0.005)

        self.on_loop(wait)


@contextmanager
def running(
    state: Path,
    *,
    model: str | Path = "embedded",
    launcher: EngineProcess | None = None,
    engine: dict[str, Any] | None = None,
    change: Callable[[LLM], object] = lambda llm: None,
    apps: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """`apps`: prefixes by name, as their files have them."""
    options = EngineOptions(model=model, **{**ENGINE, **(engine or {})})
    path = find_model(model)
    launcher = launcher or EngineThread(options.replace(model=path), change)
    files = {name: state.with_name(f"{state.name}-{name}.json") for name in apps or {}}
    for name, file in files.items():
        file.write_text(json.dumps(apps[name]))
    settings = {"grace": 5.0, "apps": [f"{name}={files[name]}" for name in files], **settings}
    server = Running(Settings(engine=options, state=state, **settings), path, launcher)
    try:
        yield server
    finally:
        server.stop()


def process_launcher(model: str | Path = "embedded", **options: Any) -> EngineProcess:
    """The engine as it is in earnest: a process."""
    return EngineProcess(EngineOptions(model=find_model(model), **{**ENGINE, **options}))

"""The life of the engine process, as the server sees it: started, watched, started again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Literal

from onestem.errors import ConfigError
from onestem.server.errors import EngineDownError
from onestem.server.link.channel import frame, read_message
from onestem.server.link.messages import Ask, Failed, Ready, Stop, Unask
from onestem.server.link.process import EngineProcess, ProcessLink
from onestem.server.link.watchdog import Watchdog
from onestem.server.logs import log

LONGEST_PAUSE = 30.0
STOP_SECONDS = 10.0

State = Literal["starting", "running", "stuck", "down", "stopped"]


class Supervisor:
    """Keeps an engine running, from `start` to `stop`.

    Args:
        launcher: starts it.
        timeout: restart an engine that has work and is silent for this long, in seconds; 0: never.
        on_message: called with what an engine says.
        on_down: called when an engine has ended, unless it was stopped.

    Attributes:
        state: `running` is the only one in which requests are taken; error: why it is another;
            since: its beginning, in unix seconds.
        restarts: engines that were started after the first.
        pid: of the engine that runs or ran last.
    """

    def __init__(
        self,
        launcher: EngineProcess,
        timeout: float,
        on_message: Callable[[Any], object],
        on_down: Callable[[], object],
    ) -> None:
        self.state: State = "starting"
        self.error: str | None = None
        self.since = time.time()
        self.restarts = 0
        self.pid: int | None = None
        self.watchdog = Watchdog(timeout)
        self._launcher = launcher
        self._on_message = on_message
        self._on_down = on_down
        self._link: ProcessLink | None = None
        self._started: asyncio.Future[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._settled = asyncio.Event()  # it runs, or never will

    async def start(self) -> None:
        """Start an engine; from then on it is restarted whenever it ends.

        Raises:
            ConfigError: it cannot start, or was stopped before.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._keeping = asyncio.create_task(self._keep())
        if self.watchdog.limit:
            self._watching = asyncio.create_task(self._watch())
        await self._started

    async def stop(self) -> None:
        """End the engine for good."""
        self._stopping.set()
        self.send(Stop())
        if self._keeping is not None:
            patience = STOP_SECONDS if self.state == "running" else 0
            await asyncio.wait({self._keeping}, timeout=patience)
            if self._link is not None:  # it loads, or a step does not end
                self._link.writer.close()
            await self._keeping
        if self._watching is not None:
            await self._watching
        if self._started is not None and not self._started.done():
            self._started.set_exception(ConfigError("the engine was stopped while it loaded"))
        self._set_state("stopped", "the server is stopping")

    def kill(self) -> None:
        """End the engine at once; its event loop is closed."""
        if self._link is not None:
            with contextlib.suppress(RuntimeError):  # the loop's, after the engine's end
                self._link.kill()

    async def settled(self) -> None:
        """Wait until an engine runs, or never will."""
        await self._settled.wait()

    def check_up(self) -> None:
        """Raise a 503 unless the engine takes requests."""
        if self.state != "running":
            raise EngineDownError(f"the engine is {self.state}: {self.error or 'it is loading'}")

    @property
    def is_connected(self) -> bool:
        """Whether there is an engine that may hear what is sent, loaded or not."""
        return self._link is not None

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def send(self, message: object) -> None:
        """Send a message, if there is an engine. Raises what pickle does of one that it cannot
        write."""
        data = frame(message)
        if self._link is not None:
            checking = isinstance(message, Ask) and message.what == "validate"
            if not (checking or isinstance(message, Unask)):
                self.watchdog.note_sent()
            with contextlib.suppress(OSError, RuntimeError):  # it is gone; EOF says so soon
                self._link.writer.write(data)

    async def _keep(self) -> None:
        pause = 0.0
        while not self._stopping.is_set():
            began = time.monotonic()
            reason = await self._run_engine()
            if self._stopping.is_set():
                return
            self._set_state("down", reason)
            log.error("engine_down", error=reason)
            self._on_down()
            if self._started is not None and not self._started.done():
                self._started.set_exception(ConfigError(reason))
                return
            pause = 0.0 if time.monotonic() - began > 60 else min(2 * pause + 0.5, LONGEST_PAUSE)
            if await self._stops_within(pause):
                return
            self.restarts += 1

    async def _stops_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()

    async def _watch(self) -> None:
        while not await self._stops_within(self.watchdog.interval):
            if self.watchdog.tick() and self.state == "running" and self._link is not None:
                reason = f"the engine had work and was silent for {self.watchdog.limit:g} s"
                self._set_state("stuck", reason)
                log.error("engine_stuck", error=reason)
                self._link.kill()

    async def _run_engine(self) -> str:
        """Start an engine and listen to it until it is gone; returns why it went."""
        reason = None
        try:
            link = self._link = await self._launcher.launch()
        except OSError as error:
            return f"the engine process cannot be started: {error}"
        self.watchdog.restart()
        if self._stopping.is_set():
            link.writer.close()
        try:
            while True:
                message = await read_message(link.reader)
                if isinstance(message, Failed):
                    reason = message.message
                else:
                    self._hear(message)
        except EOFError:
            reason = self.error if self.state == "stuck" else reason
        except Exception as error:  # nobody would listen to this engine any more
            log.exception("engine_unheard", error)
            reason = f"what the engine said was not understood: {type(error).__name__}: {error}"
            link.kill()
        self._link = None
        ended = await link.end()
        return reason or f"the engine process ended ({ended})"

    def _hear(self, message: Any) -> None:
        if not isinstance(message, Ready):
            self._on_message(message)
            return
        self.pid = message.pid
        self._set_state("running")
        log.info("engine_ready", restarts=self.restarts)
        self._on_message(message)
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _set_state(self, state: State, error: str | None = None) -> None:
        self.state, self.error, self.since = state, error, time.time()
        if state in ("running", "stopped"):
            self._settled.set()
        else:
            self._settled.clear()

"""The server's side of the engine: asks it, tells it, takes what is new.

Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from onestem.request import Request
from onestem.server.errors import ApiError, EngineDownError
from onestem.server.link.messages import Answered, Ask, Begun, Facts, Ready, Report
from onestem.server.link.open_jobs import OpenJobs
from onestem.server.link.open_requests import OpenRequests
from onestem.server.link.pending_calls import PendingCalls
from onestem.server.link.process import EngineProcess
from onestem.server.link.recent_window import RecentWindow
from onestem.server.link.supervisor import Supervisor

ANSWER_SECONDS = 60.0
NOBODY = -1  # token of a question whose answer is ignored


class EngineClient:
    """An engine that may die at any moment, as seen from the server.

    Args:
        launcher: starts it.
        queue_limit, stream_interval: see `OpenRequests`; engine_timeout: see `Supervisor`.

    Attributes:
        supervisor, requests, jobs: its life, and what it works on.
        is_paused, sleep_level: as the engine was last ordered; a new engine gets the same orders.
        facts: of the engine that runs or ran last.
        num_running: sequences in the engine.
        on_up: called whenever an engine is ready, before it gets its first request.
    """

    def __init__(
        self,
        launcher: EngineProcess,
        queue_limit: int,
        *,
        stream_interval: int = 1,
        engine_timeout: float = 0,
    ) -> None:
        self.supervisor = Supervisor(launcher, engine_timeout, self._take, self._go_down)
        self.requests = OpenRequests(self.supervisor, queue_limit, stream_interval)
        self.jobs = OpenJobs(self.supervisor)
        self.is_paused = False
        self.sleep_level = 0  # 0: awake
        self._sleep_orders = asyncio.Lock()
        self.facts: Facts | None = None
        self.num_running = 0
        self.on_up: Callable[[], object] = lambda: None
        self._pending_calls = PendingCalls(self.supervisor.send)
        self._stats: dict[str, float] = {}
        self._stats_before: dict[str, float] = {}
        self._job_steps = RecentWindow(10.0, most=256)

    async def start(self) -> None:
        """Start the engine (see `Supervisor.start`)."""
        await self.supervisor.start()

    async def stop(self) -> None:
        """End the engine; requests that still wait get an error."""
        await self.supervisor.stop()
        self.requests.forget_aborted()
        self.requests.fail_all(EngineDownError("the server is stopping: try again later"))

    def check_awake(self) -> None:
        """Raise a 503 while the engine is asleep."""
        if self.sleep_level:
            raise ApiError(
                503,
                "the engine is asleep: its operator wakes it with POST /wake_up",
                code="engine_asleep",
            )

    async def ask(
        self,
        what: str,
        value: Any = None,
        seconds: float = ANSWER_SECONDS,
        *,
        key: str = "",
        weight: float = 1.0,
    ) -> Any:
        """The engine's answer to a question; arguments and errors as of `PendingCalls.ask`."""
        self.supervisor.check_up()
        return await self._pending_calls.ask(what, value, seconds, key, weight)

    async def control(self, what: str, value: Any = None) -> Any:
        """Have the engine do something between two steps, however long that takes (see
        `Orders`); errors as of `ask`, which may be any `OnestemError` here."""
        self.supervisor.check_up()
        if what in ("sleep", "wake_up"):
            async with self._sleep_orders:  # two that cross would leave the first one's level
                return await self._order_sleep(what, value)
        answer = await self._pending_calls.ask(what, value, None)
        if what == "pause":
            self.is_paused = True
        return answer

    async def _order_sleep(self, what: str, value: Any) -> Any:
        before = self.sleep_level
        if what == "sleep":  # from now on requests would reach an engine that sleeps
            self.sleep_level = max(value, before)
        try:
            answer = await self._pending_calls.ask(what, value, None)
        except Exception:
            self.sleep_level = before
            raise
        if what == "wake_up" and answer:
            self.sleep_level = 0
        return answer

    async def validate(self, request: Request) -> None:
        """Wait until the engine has checked a request, and compiled its grammar. One that dies
        meanwhile is asked again when it is back, once.

        Raises:
            RequestError: the request cannot be answered.
            EngineDownError: the engine died twice, or was stopped.
        """
        await self.supervisor.settled()
        try:
            await self.control("validate", request)
        except EngineDownError:
            await self.supervisor.settled()
            await self.control("validate", request)

    def resume(self) -> None:
        """Go on after a pause, or give up waiting for one; also for an engine that is not up."""
        self.is_paused = False
        self.tell("resume")

    def tell(self, what: str, value: Any = None) -> None:
        """`control` without waiting for its end."""
        self.supervisor.send(Ask(NOBODY, what, value))

    @property
    def stats(self) -> dict[str, float]:
        """The engine's counts since the server's start."""
        names = {**self._stats_before, **self._stats}
        return {name: self._stats_before.get(name, 0) + self._stats.get(name, 0) for name in names}

    @property
    def job_step_seconds(self) -> float:
        """The longest recent step in which jobs had the engine to themselves."""
        return self._job_steps.most

    def _take(self, message: Any) -> None:
        if isinstance(message, Report):
            self._take_report(message)
        elif isinstance(message, Begun):
            self.requests.take_begun(message)
        elif isinstance(message, Answered):
            self._pending_calls.take(message)
        elif isinstance(message, Ready):
            self._take_ready(message)

    def _take_ready(self, ready: Ready) -> None:
        self.facts = ready.facts
        if self.is_paused:
            self.tell("pause")
        self.on_up()
        self.requests.hand_over()
        if self.sleep_level:  # after the requests: an engine that sleeps refuses them
            self.tell("sleep", self.sleep_level)

    def _take_report(self, report: Report) -> None:
        self.supervisor.watchdog.note_report(report.num_taken, busy=report.busy)
        self.num_running = report.num_running
        if report.stats is not None:
            self._stats = dict(report.stats)
            if report.job_step_seconds:
                self._job_steps.note(report.job_step_seconds)
        self.requests.take_tokens(report.tokens)
        for delta in report.deltas:
            self.requests.take_delta(delta)
        for name, last in report.aborted.items():
            self.requests.take_aborted(name, last)
        for name, why in report.refused.items():
            self.requests.refuse(name, why)
        self.jobs.take(report.jobs)
        self.jobs.take(report.pulled.items())

    def _go_down(self) -> None:
        self._stats_before, self._stats = dict(self.stats), {}
        self.num_running = 0
        self.requests.take_back()
        self._pending_calls.fail(EngineDownError("the engine died: it is being started again"))
        self.jobs.end()

"""The server's side of the engine: sends requests, takes what is new, restarts it.

Everything here runs on the event loop. Requests wait in the engine, which decides their order; here
they are counted, and kept so that they can be sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from onestem.errors import ConfigError, RequestError
from onestem.pml import EncodedSegment
from onestem.request import Request, RequestOutput
from onestem.server.errors import (
    ApiError,
    BusyError,
    EngineDownError,
    NoAnswerError,
    as_api_error,
)
from onestem.server.link.messages import (
    Abort,
    Add,
    Answered,
    Ask,
    Begun,
    Delta,
    Facts,
    Failed,
    JobRequests,
    Pin,
    Prefetch,
    Ready,
    RemoveJob,
    Report,
    Stop,
    Tokens,
    Unask,
    Unpin,
    frame,
    read_message,
)
from onestem.server.link.pacing import ChunkSize, RecentWindow, Watchdog
from onestem.server.logs import log

__all__ = [
    "ANSWER_SECONDS",
    "EngineClient",
    "EngineLink",
    "Launcher",
    "JobSink",
    "Listener",
    "OnEnd",
    "PendingAborts",
    "PendingCalls",
    "nobody",
]


class EngineLink(Protocol):
    """A started engine."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def kill(self) -> None:
        """End the engine at once, whatever it does."""
        ...

    async def end(self) -> str:
        """Make sure that the engine is gone; returns how it ended."""
        ...


class Launcher(Protocol):
    async def launch(self) -> EngineLink: ...


# ----------------------------------------------------------------------------- listeners
# Receivers of what the engine sends.


class Listener(Protocol):
    """Receives a request's news, until it has ended."""

    def on_token(self, index: int, token_id: int, text: str, weights_version: int) -> None: ...
    def on_delta(self, delta: Delta) -> None: ...
    def on_restart(self) -> None:
        """The engine died: the request's news will come again, from their beginning."""
        ...

    def on_error(self, error: ApiError) -> None: ...


class JobSink(Protocol):
    """Receives a job's outputs."""

    def on_output(self, output: RequestOutput) -> None: ...
    def on_pulled(self, count: int) -> None: ...
    def on_down(self) -> None: ...


# ----------------------------------------------------------------------------- pending aborts
# Requests that were aborted, until the engine has said what they have cost.

# Called once with a request's end (its pieces are not news); None where it is unknown.
OnEnd = Callable[[Delta | None], object]


def nobody(last: Delta | None) -> None:
    """Ignore a request's end."""


class PendingAborts:
    """What to call, by request id, when the engine is done with an aborted request."""

    def __init__(self) -> None:
        self._waiting: dict[str, OnEnd] = {}

    def add(self, request_id: str, on_end: OnEnd) -> None:
        self._waiting[request_id] = on_end

    async def gone(self, request_id: str) -> None:
        """Wait until the engine is done with a request, if it was aborted: its id is free then."""
        if request_id not in self._waiting:
            return
        before, gone = self._waiting[request_id], asyncio.get_running_loop().create_future()

        def end(last: Delta | None) -> None:
            before(last)
            if not gone.done():
                gone.set_result(None)

        self._waiting[request_id] = end
        await gone

    def take(self, request_id: str, last: Delta | None) -> None:
        """The engine is done with a request, whether it was aborted or ended by itself."""
        on_end = self._waiting.pop(request_id, nobody)
        try:
            on_end(last)
        except Exception as error:  # of one request: the news of others follow
            log.exception("news_failed", error, id=request_id)

    def give_up(self) -> None:
        """The engine is gone."""
        for request_id in list(self._waiting):
            self.take(request_id, None)


# ----------------------------------------------------------------------------- pending calls
# What the engine was asked and has not answered yet.


class PendingCalls:
    """Sends questions and hands each answer to its asker.

    Args:
        send: a message to the engine process.
    """

    def __init__(self, send: Callable[[Ask | Unask], object]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[Answered]] = {}
        self._tokens = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    async def ask(
        self, what: str, value: Any, seconds: float | None, key: str = "", weight: float = 1.0
    ) -> Any:
        """The answer to a question (see `messages.Ask`), which may take `seconds`; None: any time.
        The engine hears of it if nobody waits any more for a request to be validated.

        Raises:
            NoAnswerError: none within `seconds`.
            BusyError: the machine has no time or memory left for it.
            RequestError: the engine refuses; ApiError: it failed to find out, or is gone.
        """
        token = next(self._tokens)
        future = self._open[token] = asyncio.get_running_loop().create_future()
        sent = False
        try:
            self._send(Ask(token, what, value, key, weight))
            sent = True
            answer = await asyncio.wait_for(future, seconds)
        except TimeoutError:
            raise NoAnswerError(seconds or 0.0) from None
        finally:
            self._open.pop(token, None)
            if sent and what == "validate" and future.cancelled():
                self._send(Unask(token))
        if answer.error is None:
            return answer.value
        if not answer.lasts:
            raise BusyError(answer.error)
        if answer.fault:
            raise RequestError(answer.error)
        raise ApiError(500, answer.error, code="engine_error")

    def take(self, answer: Answered) -> None:
        """An answer has come."""
        future = self._open.get(answer.token)
        # Also one that is an error: a future with an exception stays until the collector comes,
        # with all that its frames have.
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, error: ApiError) -> None:
        """The engine is gone."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)


# ----------------------------------------------------------------------------- client

LONGEST_PAUSE = 30.0
ANSWER_SECONDS = 60.0
NOBODY = -1  # token of a question whose answer is ignored
STOP_SECONDS = 10.0

State = Literal["starting", "running", "stuck", "down", "stopped"]


@dataclass
class _Entry:
    request: Request
    key: str
    weight: float
    listener: Listener
    number: int | None = None  # among those that were sent to this engine
    begun: bool = False  # by this engine
    was_lost: bool = False  # an engine died that had begun it

    @property
    def sent(self) -> bool:
        return self.number is not None

    def tell_error(self, error: ApiError) -> None:
        """Tell the listener; one that fails keeps nobody else from hearing."""
        try:
            self.listener.on_error(error)
        except Exception as failure:
            log.exception("news_failed", failure, id=self.request.request_id)


class EngineClient:
    """An engine that may die at any moment, as seen from the server.

    Args:
        launcher: starts it.
        queue_limit: maximum requests of a key that wait.
        stream_interval: minimum tokens of a stream's chunk (see `ChunkSize`).
        engine_timeout: restart an engine that has work and is silent for this long, in seconds; 0:
            never.

    Attributes:
        state: `running` is the only one in which requests are taken.
        waiting: key -> its requests that the engine has not begun.
        is_paused, sleep_level: as the engine was last ordered; a new engine gets the same orders.
        facts, pid: of the engine that runs or ran last.
        stats: the engine's counts since the server's start.
        on_up: called whenever an engine is ready, before it gets its first request.
        on_refused: called with a prefix that the engine refuses, and the reason.
    """

    def __init__(
        self,
        launcher: Launcher,
        queue_limit: int,
        *,
        stream_interval: int = 1,
        engine_timeout: float = 0,
    ) -> None:
        self.state: State = "starting"
        self.error: str | None = None
        self.since = time.time()
        self.restarts = 0
        self.is_paused = False
        self.sleep_level = 0  # 0: awake
        self.facts: Facts | None = None
        self.pid: int | None = None
        self.queue_limit = queue_limit
        self.waiting: Counter[str] = Counter()
        self.chunk_size = ChunkSize(stream_interval)
        self.num_running = 0
        self.on_up: Callable[[], object] = lambda: None
        self.on_refused: Callable[[str, str], object] = lambda name, why: None
        self._launcher = launcher
        self.watchdog = Watchdog(engine_timeout)
        self._link: EngineLink | None = None
        self._entries: dict[str, _Entry] = {}
        self._by_number: dict[int, _Entry] = {}  # of those that were sent
        self._leaving = PendingAborts()
        self._jobs: dict[str, JobSink] = {}
        self._questions = PendingCalls(self._send)
        self._num_sent = 0
        self._stats: dict[str, float] = {}
        self._stats_before: dict[str, float] = {}
        self._started: asyncio.Future[None] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._settled = asyncio.Event()  # it runs, or never will
        self._finished = RecentWindow(30.0, most=256)
        self._job_steps = RecentWindow(10.0, most=256)

    # ------------------------------------------------------------------------- life

    async def start(self) -> Facts:
        """Start the engine; from then on it is restarted whenever it ends.

        Raises:
            ConfigError: it cannot start, or was stopped before.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        if self.watchdog.limit:
            self._watcher = asyncio.create_task(self._watch())
        await self._started
        assert self.facts is not None
        return self.facts

    async def stop(self) -> None:
        """End the engine; requests that still wait get an error."""
        self._stopping.set()
        self._send(Stop())
        if self._supervisor is not None:
            patience = STOP_SECONDS if self.state == "running" else 0
            await asyncio.wait({self._supervisor}, timeout=patience)
            if self._link is not None:  # it loads, or a step does not end
                self._link.writer.close()
            await self._supervisor
        if self._watcher is not None:
            await self._watcher
        if self._started is not None and not self._started.done():
            self._started.set_exception(ConfigError("the engine was stopped while it loaded"))
        self._set_state("stopped", "the server is stopping")
        self._leaving.give_up()
        self.fail_all(EngineDownError("the server is stopping: try again later"))

    def kill(self) -> None:
        """End the engine at once; its event loop is closed."""
        if self._link is not None:
            with contextlib.suppress(RuntimeError):  # the loop's, after the engine's end
                self._link.kill()

    def fail_all(self, error: ApiError) -> None:
        """Tell all listeners of an error; they end their requests (`abort`)."""
        for entry in list(self._entries.values()):
            entry.tell_error(error)

    async def _supervise(self) -> None:
        pause = 0.0
        while not self._stopping.is_set():
            began = time.monotonic()
            reason = await self._run_engine()
            if self._stopping.is_set():
                return
            self._go_down(reason)
            if self._started is not None and not self._started.done():
                self._started.set_exception(ConfigError(reason))
                return
            pause = 0.0 if time.monotonic() - began > 60 else min(2 * pause + 0.5, LONGEST_PAUSE)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                return
            self.restarts += 1

    async def _watch(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self.watchdog.interval)
                return
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
                    self._take(message)
        except EOFError:
            self._link = None
            reason = self.error if self.state == "stuck" else reason
            ended = await link.end()
        except Exception as error:  # nobody would listen to this engine any more
            log.exception("engine_unheard", error)
            self._link = None
            link.kill()
            ended = await link.end()
            reason = f"what the engine said was not understood: {type(error).__name__}: {error}"
        return reason or f"the engine process ended ({ended})"

    def _set_state(self, state: State, error: str | None = None) -> None:
        self.state, self.error, self.since = state, error, time.time()
        if state in ("running", "stopped"):
            self._settled.set()
        else:
            self._settled.clear()

    def _go_down(self, reason: str) -> None:
        """Send requests that the engine had begun once more. One that was begun at two deaths gets
        an error. Requests that were not begun keep waiting."""
        self._set_state("down", reason)
        log.error("engine_down", error=reason)
        self._stats_before, self._stats = dict(self.stats), {}
        self.num_running = 0
        self._leaving.give_up()
        for entry in list(self._entries.values()):
            entry.number = None
            if entry.begun:
                self._take_back(entry)
        self._questions.fail(EngineDownError("the engine died: it is being started again"))
        for sink in list(self._jobs.values()):
            sink.on_down()
        self._jobs.clear()

    def _take_back(self, entry: _Entry) -> None:
        """Queue a request again that a dead engine had begun; the second time it fails."""
        if entry.was_lost:
            self._fail(entry, EngineDownError("the engine died twice while it answered this"))
            return
        entry.was_lost, entry.begun = True, False
        self.waiting[entry.key] += 1
        try:
            entry.listener.on_restart()
        except Exception as error:
            self._failed_to_hear(entry, error)

    def _take_ready(self, ready: Ready) -> None:
        self.facts, self.pid = ready.facts, ready.pid
        self._num_sent = 0
        self._by_number.clear()
        self._set_state("running")
        log.info("engine_ready", restarts=self.restarts)
        if self.is_paused:
            self.tell("pause")
        self.on_up()
        for entry in list(self._entries.values()):
            self._hand_over(entry)
        if self.sleep_level:  # after the requests: an engine that sleeps refuses them
            self.tell("sleep", self.sleep_level)
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _send(self, message: object) -> None:
        data = frame(message)
        if self._link is not None:
            checking = isinstance(message, Ask) and message.what == "validate"
            if not (checking or isinstance(message, Unask)):
                self.watchdog.note_sent()
            with contextlib.suppress(OSError, RuntimeError):  # it is gone; EOF says so soon
                self._link.writer.write(data)

    # ------------------------------------------------------------------------- requests

    def check_up(self) -> None:
        """Raise a 503 unless the engine takes requests."""
        if self.state != "running":
            raise EngineDownError(f"the engine is {self.state}: {self.error or 'it is loading'}")

    def check_awake(self) -> None:
        """Raise a 503 while the engine is asleep."""
        if self.sleep_level:
            raise ApiError(
                503,
                "the engine is asleep: its operator wakes it with POST /wake_up",
                code="engine_asleep",
            )

    def check_room(self, key: str, count: int) -> None:
        """Raise a 429 if a key's queue has no room for `count` more requests. The error says about
        when it will have, from the rate at which requests ended recently."""
        if self.waiting[key] + count <= self.queue_limit:
            return
        after = max(1, min(60, round((self._finished.seconds_each or 1.0) * count)))
        raise ApiError(
            429,
            f"{self.waiting[key]} requests of this key are waiting, limit is {self.queue_limit}: "
            f"try again in {after} s",
            code="queue_full",
            headers={"Retry-After": str(after)},
        )

    def submit(self, request: Request, key: str, weight: float, listener: Listener) -> None:
        """Queue a request; `listener` gets its news."""
        entry = _Entry(request, key, weight, listener)
        self._entries[request.request_id] = entry
        self.waiting[key] += 1
        if self.state == "running":
            self._hand_over(entry)

    def abort(self, request_id: str, on_end: OnEnd = nobody) -> None:
        """End a request, wherever it is; its listener gets no more news.

        Args:
            on_end: called once with the request's end; None where it is unknown.
        """
        entry = self._forget(request_id)
        if entry is not None and entry.sent and self._link is not None:
            self._leaving.add(request_id, on_end)
            self._send(Abort(request_id))
            return
        on_end(None)

    async def gone(self, request_id: str) -> None:
        """Wait until the engine has released an aborted request."""
        await self._leaving.gone(request_id)

    def by_key(self) -> Mapping[str, tuple[int, int]]:
        """Key -> (requests that wait, requests that the engine has begun)."""
        all_of = Counter(entry.key for entry in self._entries.values())
        return {key: (self.waiting[key], n - self.waiting[key]) for key, n in all_of.items()}

    def key_of(self, request_id: str) -> str | None:
        """The key whose request it is; None if the request is gone."""
        entry = self._entries.get(request_id)
        return entry.key if entry is not None else None

    @property
    def num_waiting(self) -> int:
        """Requests that the engine has not begun."""
        return self.waiting.total()

    def _hand_over(self, entry: _Entry) -> None:
        try:
            self._send(Add(entry.request, self._num_sent, entry.key, entry.weight))
        except Exception as error:  # it cannot be pickled: no other request is affected
            log.exception("unsendable_request", error, id=entry.request.request_id)
            self._fail(entry, ApiError(500, f"the request cannot be sent: {error}"))
            return
        entry.number = self._num_sent
        self._by_number[entry.number] = entry
        self._num_sent += 1

    def _fail(self, entry: _Entry, error: ApiError) -> None:
        self._forget(entry.request.request_id)
        entry.tell_error(error)

    def _failed_to_hear(self, entry: _Entry, error: Exception) -> None:
        """A request whose listener fails ends, and no other."""
        name = entry.request.request_id
        log.exception("news_failed", error, id=name)
        if name in self._entries:
            self.abort(name)
        entry.tell_error(ApiError(500, f"{type(error).__name__}: {error}"))

    def _forget(self, request_id: str) -> _Entry | None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.waiting[entry.key] -= not entry.begun
            if entry.number is not None:
                self._by_number.pop(entry.number, None)
        return entry

    # ------------------------------------------------------------------------- messages

    def _take(self, message: Any) -> None:
        if isinstance(message, Report):
            self._take_report(message)
        elif isinstance(message, Begun):
            self._take_begun(message)
        elif isinstance(message, Answered):
            self._questions.take(message)
        elif isinstance(message, Ready):
            self._take_ready(message)

    def _take_report(self, report: Report) -> None:
        self.watchdog.note_report(report.num_taken, busy=report.busy)
        self.num_running = report.num_running
        if report.stats is not None:
            self._stats = dict(report.stats)
            if report.job_step_seconds:
                self._job_steps.note(report.job_step_seconds)
        self._take_tokens(report.tokens)
        for delta in report.deltas:
            self._take_delta(delta)
        for name, last in report.aborted.items():
            self._leaving.take(name, last)
        for name, why in report.refused.items():
            entry = self._entries.get(name)
            if entry is not None:
                self._fail(entry, as_api_error(RequestError(why)))
            else:
                self.on_refused(name, why)
        for output in report.jobs:
            if output.job_id in self._jobs:
                self._jobs[output.job_id].on_output(output.output)
        for job_id, count in report.pulled.items():
            if job_id in self._jobs:
                self._jobs[job_id].on_pulled(count)

    def _take_begun(self, begun: Begun) -> None:
        for entry in filter(None, map(self._entries.get, begun.request_ids)):
            entry.begun = True
            self.waiting[entry.key] -= 1

    def _take_tokens(self, tokens: Tokens) -> None:
        self.chunk_size.note(len(tokens.requests))
        rows = zip(tokens.requests, tokens.indices, tokens.token_ids, tokens.texts, strict=True)
        for number, index, token_id, text in rows:
            entry = self._by_number.get(number)
            if entry is None:
                continue
            try:
                entry.listener.on_token(index, token_id, text, tokens.weights_version)
            except Exception as error:
                self._failed_to_hear(entry, error)

    def _take_delta(self, delta: Delta) -> None:
        entry = self._entries.get(delta.request_id)
        if entry is None:
            if delta.finished:  # it ended while its abort was under way
                self._leaving.take(delta.request_id, delta)
            return
        if delta.finished:
            self._forget(delta.request_id)
            self._finished.note()
        try:
            entry.listener.on_delta(delta)
        except Exception as error:
            self._failed_to_hear(entry, error)

    async def ask(
        self,
        what: str,
        value: Any = None,
        seconds: float = ANSWER_SECONDS,
        *,
        key: str = "",
        weight: float = 1.0,
    ) -> Any:
        """The engine's answer to a question; `key`, `weight`: see `messages.Ask`.

        Raises:
            EngineDownError: it is not there.
            NoAnswerError: it does not answer within `seconds`.
            BusyError: the machine has no time or memory left for it.
            RequestError: it refuses; ApiError: it failed to find out.
        """
        self.check_up()
        return await self._questions.ask(what, value, seconds, key, weight)

    async def control(self, what: str, value: Any = None) -> Any:
        """Have the engine do something between two steps, however long that takes (see
        `Worker.orders`); errors as of `ask`, which may be any `OnestemError` here."""
        self.check_up()
        before = self.sleep_level
        if what == "sleep":  # from now on requests would reach an engine that sleeps
            self.sleep_level = max(value, before)
        try:
            answer = await self._questions.ask(what, value, None)
        except Exception:
            self.sleep_level = before
            raise
        if what == "pause":
            self.is_paused = True
        elif what == "wake_up" and answer:
            self.sleep_level = 0
        return answer

    async def validate(self, request: Request) -> None:
        """Wait until the engine has checked a request, and compiled its grammar. One that dies
        meanwhile is asked again when it is back, once.

        Raises:
            RequestError: the request cannot be answered.
            EngineDownError: the engine died twice, or was stopped.
        """
        await self._settled.wait()
        try:
            await self.control("validate", request)
        except EngineDownError:
            await self._settled.wait()
            await self.control("validate", request)

    def resume(self) -> None:
        """Go on after a pause, or give up waiting for one; also for an engine that is not up."""
        self.is_paused = False
        self.tell("resume")

    def tell(self, what: str, value: Any = None) -> None:
        """`control` without waiting for its end."""
        self._send(Ask(NOBODY, what, value))

    # ------------------------------------------------------------------------- the rest

    @property
    def stats(self) -> dict[str, float]:
        names = {**self._stats_before, **self._stats}
        return {name: self._stats_before.get(name, 0) + self._stats.get(name, 0) for name in names}

    @property
    def job_step_seconds(self) -> float:
        """The longest recent step in which jobs had the engine to themselves."""
        return self._job_steps.most

    def pin(self, name: str, token_ids: list[int], cache_salt: str) -> None:
        self._send(Pin(name, token_ids, cache_salt))

    def unpin(self, name: str) -> None:
        self._send(Unpin(name))

    def prefetch(self, segments: Sequence[EncodedSegment], cache_salt: str) -> None:
        self._send(Prefetch(segments, cache_salt))

    def open_job(self, job_id: str, sink: JobSink) -> None:
        self.check_up()
        self._jobs[job_id] = sink

    def send_job(self, job_id: str, requests: Sequence[Request], *, first: bool = False) -> None:
        """The next requests of a job; more may follow. `first`: they go before other jobs'."""
        self._send(JobRequests(job_id, requests, first))

    def close_job(self, job_id: str) -> None:
        if self._jobs.pop(job_id, None) is not None:
            self._send(RemoveJob(job_id))

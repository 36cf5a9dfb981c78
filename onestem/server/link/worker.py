"""The engine process: takes commands, computes steps, reports what is new.

Only the main thread touches the engine, except that requests are checked in threads of their own,
and grammars compiled in processes. So a large JSON schema delays no step and no other schema.
When the server ends, in whatever way, so does this process.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from onestem.engine.sequence import RequestState
from onestem.errors import OnestemError, RankError
from onestem.garbage import collecting_less, giving_holes_back, share_heaps
from onestem.options import EngineOptions
from onestem.request import RequestOutput
from onestem.server.link.admission_window import AdmissionWindow
from onestem.server.link.channel import Channel
from onestem.server.link.checks import Checks
from onestem.server.link.job_feeds import JobFeeds
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
    Ready,
    RemoveJob,
    Report,
    Stop,
    Unask,
)
from onestem.server.link.orders import Orders
from onestem.server.link.reports import Deltas, last_delta
from onestem.server.logs import set_up

if TYPE_CHECKING:
    from onestem.engine.engine import Engine

log = logging.getLogger(__name__)

STATS_SECONDS = 0.25
# Between looks whether freed memory is worth giving back. Steps need most of it again, and clearing
# it takes them up to 0.1 s each time; grammars and answers that are forgotten leave the rest.
TRIM_SECONDS = 120
CLOSE_SECONDS = 3.0  # to write what a restart would lose; the server waits for little more
# What a step may take: about as long as a new request has to wait. Jobs that have had the engine to
# themselves for a short while get shorter steps, because the next request may come any moment.
CPU_STEP_MS, GPU_STEP_MS = 300.0, 100.0
RECENT_SECONDS, SHORT_STEP = 10.0, 1 / 3
JOBS_SHARE = 2  # of host memory for answers; the rest is for whoever comes next


def load(options: EngineOptions) -> Engine:
    """A model's engine; steps are bounded unless `max_step_ms` is 0, and jobs leave memory for
    answers to others."""
    from onestem.build import build_engine, pick_device

    if options.max_step_ms is None:
        on_gpu = pick_device(options.device).type == "cuda"
        options = options.replace(max_step_ms=GPU_STEP_MS if on_gpu else CPU_STEP_MS)
    engine = build_engine(options)
    answers = engine.scheduler.answers
    answers.most_of_jobs = answers.limit.most // JOBS_SHARE
    return engine


def load_with_ranks(options: EngineOptions) -> Engine:
    """The same for callers in Python: log-probabilities have ranks."""
    engine = load(options)
    engine.launcher.sampler.tell_ranks()
    return engine


class Worker:
    """Runs an engine on behalf of the other end of a channel.

    Args:
        engine: with its model.
        channel: to the server.
        leave: called when the server is gone; should end the process.
    """

    def __init__(self, engine: Engine, channel: Channel, leave: Callable[[], object]) -> None:
        self._engine = engine
        self._engine.requests.on_begin = lambda request_ids: channel.send(Begun(request_ids))
        self._channel = channel
        self._leave = leave
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._checks = Checks(engine, self._commands.put)
        line = engine.requests.queue.interactive
        line.gate = self._admission_window = AdmissionWindow(line.gate)
        self._deltas = Deltas()
        self._job_feeds = JobFeeds(engine)
        self._orders = Orders(engine, self._job_feeds.job_of)
        self._num_taken = 0
        self._refused: dict[str, str] = {}
        self._aborted: dict[str, Delta | None] = {}
        self._answers: list[Answered] = []
        self._running = True
        self._stats_at = 0.0
        self._step_seconds = self._engine.limits.step_seconds
        self._interactive_at = float("-inf")
        self._job_step_seconds = 0.0

    def run(self) -> None:
        """Run until a `Stop` comes, or the server is gone."""
        threading.Thread(target=self.receive, name="receive", daemon=True).start()
        decoder = self._engine.weights.decoder
        facts = Facts(
            options=self._engine.options,
            vocab_size=decoder.config.vocab_size,
            kv_tokens=self._engine.cache.pool.num_tokens,
            kv_bytes_per_token=decoder.kv_bytes_per_token,
        )
        self._channel.send(Ready(facts, os.getpid()))
        try:
            while self._running:
                self.turn()
        finally:
            self._checks.close()

    def receive(self) -> None:
        """Queue what comes, until the server is gone; requests to check are begun at once."""
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, Ask) and message.what == "validate":
                    self._checks.begin(message)
                elif isinstance(message, Unask):
                    self._checks.drop(message.token)
                else:
                    self._commands.put(message)
        except (EOFError, OSError, RuntimeError):
            pass  # the server is gone
        finally:  # a process that hears nothing any more serves nobody
            self._commands.put(Stop())
            self._leave()

    def turn(self) -> None:
        """Take what has come, compute a step, and report; sleep where there is nothing to do."""
        busy = self._is_busy
        took = self._take_commands(wait=not busy)
        self._job_feeds.feed()
        news = self._step() if self._is_busy else ([], [])
        if took or news[0] or busy:
            self._report(*news)

    @property
    def _is_busy(self) -> bool:
        return self._engine.has_unfinished() and self._engine.can_step

    def _step(self) -> tuple[list[RequestOutput], list[RequestState]]:
        began = time.monotonic()
        for_jobs = not len(self._deltas)
        if not for_jobs:
            self._interactive_at = began
        if self._step_seconds is not None:
            short = for_jobs and began - self._interactive_at < RECENT_SECONDS
            self._engine.limits.step_seconds = self._step_seconds * (SHORT_STEP if short else 1)
        news = self._engine.step_news()
        if for_jobs:
            took = time.monotonic() - began
            self._job_step_seconds = max(self._job_step_seconds, took)
        return news

    def _take_commands(self, *, wait: bool) -> bool:
        """Take what has come; sleep for it if there is nothing else to do."""
        took = False
        self._admission_window.close()
        while self._running:
            try:
                message = self._commands.get(block=wait and not took)
            except queue.Empty:
                break
            took = True
            self._num_taken += not isinstance(message, Answered)
            self.take(message)
        num_held = self._engine.requests.queue.interactive.num_held
        if num_held:  # an idle engine lets all in: no running request would be delayed
            num_streams = 0 if wait else max(0, len(self._deltas) - self._engine.num_waiting)
            self._admission_window.look(num_streams, num_held)
        return took

    def _report(self, outputs: list[RequestOutput], going_on: list[RequestState]) -> None:
        now = time.monotonic()
        idle = not self._is_busy
        stats, job_step = None, 0.0
        if idle or now - self._stats_at >= STATS_SECONDS:
            self._stats_at = now
            stats = self._engine.stats.to_dict()
            job_step, self._job_step_seconds = self._job_step_seconds, 0.0
        tokens, deltas = self._deltas.of(outputs, going_on, self._engine.weights.version)
        self._channel.send(
            Report(
                tokens=tokens,
                deltas=deltas,
                refused=self._refused,
                aborted=self._aborted,
                num_running=self._engine.num_running,
                jobs=self._job_feeds.outputs(outputs),
                pulled=self._job_feeds.pulled,
                stats=stats,
                job_step_seconds=job_step,
                num_taken=self._num_taken,
                busy=not idle,
            )
        )
        self._refused, self._aborted = {}, {}
        for answer in self._answers:
            self._channel.send(answer)
        self._answers = []

    def take(self, message: Any) -> None:
        """Do what a message asks for; what came of it goes into the next report."""
        match message:
            case Add():
                self._add(message)
            case Abort(name):
                output = self._engine.abort(name)
                self._aborted[name] = last_delta(output, []) if output is not None else None
                self._deltas.forget(name)
            case JobRequests():
                self._job_feeds.extend(message)
            case RemoveJob(job_id):
                self._job_feeds.remove(job_id)
            case Ask():
                self._answers.append(self._orders.answer(message))
            case Answered():
                self._answers.append(message)
            case Stop():
                self._running = False
            case _:
                raise TypeError(f"an unknown message: {message!r}")

    def _add(self, message: Add) -> None:
        name = message.request.request_id
        self._deltas.begin(name, message.number)
        try:
            self._engine.add_request(message.request, key=message.key, weight=message.weight)
            return
        except OnestemError as error:
            why = str(error)
        except Exception as error:  # else the next engine would get it, and end alike
            log.error("a request cannot be taken: %s", name, exc_info=error)
            why = f"the request cannot be taken: {type(error).__name__}: {error}"
        self._deltas.forget(name)
        self._refused[name] = why


def _told(channel: Channel, line: str, *, fault: bool = False) -> bool:
    """Tell the server why the engine ends; False: it is gone itself."""
    try:
        channel.send(Failed(line, fault=fault))
    except OSError:
        return False
    return True


def _end_with_rank(channel: Channel, line: str) -> None:
    """A rank is gone, even if no request runs: end, so that the server restarts all."""
    try:
        _told(channel, line)
    finally:
        os._exit(1)


def main() -> None:
    """`python -m onestem.server.link.worker FD`: the channel is that file descriptor."""
    share_heaps()
    # The server says when to end, even if a signal goes to the whole process group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    factory, options, logs = channel.receive()
    if logs:
        set_up(*logs)
    module, _, name = factory.partition(":")
    try:
        engine = getattr(importlib.import_module(module), name)(options)
    except OnestemError as error:
        _told(channel, str(error), fault=not isinstance(error, RankError))
        return
    except Exception as error:
        _told(channel, f"{type(error).__name__}: {error}")
        raise
    worker = Worker(engine, channel, leave=lambda: os._exit(0))
    if engine.team is not None:
        engine.team.on_death(partial(_end_with_rank, channel))
    try:
        with collecting_less(clean=True), giving_holes_back(TRIM_SECONDS):
            worker.run()
        engine.close(CLOSE_SECONDS)
    except RankError as error:
        _end_with_rank(channel, str(error))
    except Exception as error:
        if _told(channel, f"{type(error).__name__}: {error}"):
            raise
    os._exit(0)


if __name__ == "__main__":
    main()

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
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial, singledispatchmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from onestem.engine.grammar.trial import CostlyGrammarError
from onestem.engine.sequence import RequestState
from onestem.errors import CacheError, OnestemError, RankError
from onestem.garbage import collecting_less, share_heaps
from onestem.options import EngineOptions
from onestem.request import Request, RequestOutput
from onestem.server.link.messages import (
    Abort,
    Add,
    Answered,
    Ask,
    Begun,
    Channel,
    Delta,
    Facts,
    Failed,
    JobOutput,
    JobRequests,
    Pin,
    Prefetch,
    Ready,
    RemoveJob,
    Report,
    Stop,
    Unask,
    Unpin,
)
from onestem.server.link.reports import Deltas, last_delta, snapshot_of

if TYPE_CHECKING:
    from onestem.engine.engine import Engine

__all__ = ["AdmissionWindow", "JobFeed", "Worker", "facts_of", "load", "load_with_ranks", "main"]

log = logging.getLogger(__name__)

STATS_SECONDS = 0.25
CHECKING = 4  # requests at once, beside the steps
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
    if answers.limit.most is not None:
        answers.most_of_jobs = answers.limit.most // JOBS_SHARE
    return engine


def load_with_ranks(options: EngineOptions) -> Engine:
    """The same for callers in Python: log-probabilities have ranks."""
    engine = load(options)
    engine.tell_ranks()
    return engine


def facts_of(engine: Engine) -> Facts:
    """What the server must know of an engine that has started."""
    return Facts(
        options=engine.options,
        vocab_size=engine.decoder.config.vocab_size,
        kv_tokens=engine.cache.pool.num_tokens,
        kv_bytes_per_token=engine.decoder.kv_bytes_per_token,
    )


# ----------------------------------------------------------------------------- admission window
# When new requests may join those that run.
#
# They may join at any step, but a step with prompts has rows of its own to lay out and to launch.
# So where many run, new requests wait a little for one another, and join together.

SECONDS_PER_STREAM = 0.00004
LONGEST_WAIT = 0.02
ENOUGH = 24  # new requests that need not wait for more

T = TypeVar("T")


class AdmissionWindow(Generic[T]):
    """Requests that have come and have not joined, in order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrived: dict[str, T] = {}
        self._joined_at = float("-inf")

    def __len__(self) -> int:
        return len(self._arrived)

    def add(self, name: str, item: T) -> None:
        self._arrived[name] = item

    def remove(self, name: str) -> bool:
        """Remove a request; returns whether it was here."""
        return self._arrived.pop(name, None) is not None

    def take(self, num_streams: int) -> list[T]:
        """Take all, if it is time to join `num_streams` requests that run; else none."""
        if not self._arrived:
            return []
        now = self._clock()
        patience = min(num_streams * SECONDS_PER_STREAM, LONGEST_WAIT)
        if now - self._joined_at < patience and len(self._arrived) < ENOUGH:
            return []
        self._joined_at = now
        taken, self._arrived = list(self._arrived.values()), {}
        return taken


# ----------------------------------------------------------------------------- job feed
# A job's requests on their way into the engine.


class JobFeed:
    """A job's requests as they come from the server; the engine reads them as it has room.

    The engine must never wait for the server. So a feed that runs dry reports its end, and what
    comes later is given to the engine as a further part of the job.
    """

    def __init__(self, job_id: str, first: bool) -> None:
        self.job_id = job_id
        self.first = first  # goes before other jobs
        self.pulled = 0
        self.parts: list[str] = []
        self.groups: dict[int, int] = {}  # of all parts
        self._requests: deque[Request] = deque()
        self._reading = False

    def extend(self, message: JobRequests) -> None:
        self._requests.extend(message.requests)

    def next_part(self) -> Iterator[Request] | None:
        """Requests for a further part; None while the engine reads one, or there are none."""
        if self._reading or not self._requests:
            return None
        self._reading = True
        self.parts.append(f"{self.job_id}/{len(self.parts)}")
        return self._read()

    def _read(self) -> Iterator[Request]:
        try:
            while self._requests:
                self.pulled += 1
                yield self._requests.popleft()
        finally:  # also where the engine gives a part up: the rest is for the next one
            self._reading = False


# ----------------------------------------------------------------------------- worker


class _Check:
    """A request that is being checked for somebody, who may give up any moment."""

    def __init__(self) -> None:
        self.dropped = False
        self._grammar: Future[Any] | None = None

    def begin(self, grammar: Future[Any]) -> None:
        """Its grammar is being compiled."""
        self._grammar = grammar
        if self.dropped:  # meanwhile
            grammar.cancel()

    def drop(self) -> None:
        """Nobody waits any more."""
        self.dropped = True
        if self._grammar is not None:
            self._grammar.cancel()


class Worker:
    """Runs an engine on behalf of the other end of a channel.

    Args:
        engine: with its model.
        channel: to the server.
        leave: called when the server is gone; should end the process.
    """

    def __init__(self, engine: Engine, channel: Channel, leave: Callable[[], object]) -> None:
        self._engine = engine
        self._engine.on_begin = lambda request_ids: channel.send(Begun(request_ids))
        self._facts = facts_of(engine)
        self._channel = channel
        self._leave = leave
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._checks = ThreadPoolExecutor(CHECKING, "checks")
        self._waited_for: dict[int, _Check] = {}
        self._joining: AdmissionWindow[Add] = AdmissionWindow()
        self._deltas = Deltas()
        self._feeds: dict[str, JobFeed] = {}
        self._job_of: dict[str, str] = {}
        self._num_taken = 0
        self._refused: dict[str, str] = {}
        self._aborted: dict[str, Delta | None] = {}
        self._answers: list[Answered] = []
        self._running = True
        self._stats_at = 0.0
        self._step_seconds = self._engine.scheduler.budget.seconds
        self._interactive_at = float("-inf")
        self._job_step_seconds = 0.0

    def run(self) -> None:
        """Run until a `Stop` comes, or the server is gone."""
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        self._channel.send(Ready(self._facts, os.getpid()))
        try:
            while self._running:
                self._turn()
        finally:
            self._checks.shutdown(wait=False, cancel_futures=True)

    def _receive(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, Ask) and message.what == "validate":
                    self._waited_for[message.token] = check = _Check()
                    self._checks.submit(self._validate, message, check)
                elif isinstance(message, Unask):
                    self._waited_for.pop(message.token, _Check()).drop()
                else:
                    self._inbox.put(message)
        except (EOFError, OSError, RuntimeError):
            pass  # the server is gone
        finally:  # a process that hears nothing any more serves nobody
            self._inbox.put(Stop())
            self._leave()

    def _validate(self, ask: Ask, check: _Check) -> None:
        """Check a request, and have its grammar compiled without waiting for it in this thread."""
        if check.dropped:
            return
        try:
            grammar = self._engine.prepare(ask.value, ask.key, ask.weight)
        except BaseException as error:  # a library's panic is no `Exception`
            self._tell(ask.token, error)
            return
        if grammar is None:
            self._tell(ask.token, None)
        else:  # the compiler keeps it, and what it calls: not the request
            check.begin(grammar)
            grammar.add_done_callback(partial(self._compiled, ask.token))

    def _compiled(self, token: int, grammar: Future[Any]) -> None:
        if not grammar.cancelled():
            self._tell(token, grammar.exception())

    def _tell(self, token: int, error: BaseException | None) -> None:
        """Put into the next report that a request can be answered, or why not."""
        self._waited_for.pop(token, None)
        answer = Answered(token)
        if isinstance(error, OnestemError):
            lasts = not isinstance(error, CostlyGrammarError) or error.lasts
            answer = Answered(token, error=str(error), lasts=lasts)
        elif error is not None:  # without an answer the asker would wait for ever
            why = f"the request cannot be checked: {type(error).__name__}: {error}"
            answer = Answered(token, error=why, fault=False)
        self._inbox.put(answer)

    # ------------------------------------------------------------------------- a turn

    def _turn(self) -> None:
        busy = self._is_busy
        took = self._take_commands(wait=not busy)
        self._feed_jobs()
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
        self._bound_step(short=for_jobs and began - self._interactive_at < RECENT_SECONDS)
        news = self._engine.step_news()
        if for_jobs:
            took = time.monotonic() - began
            self._job_step_seconds = max(self._job_step_seconds, took)
        return news

    def _bound_step(self, *, short: bool) -> None:
        if self._step_seconds is not None:
            bound = self._step_seconds * SHORT_STEP if short else self._step_seconds
            self._engine.scheduler.budget.seconds = bound

    def _take_commands(self, *, wait: bool) -> bool:
        """Take what has come; sleep for it if there is nothing else to do."""
        took = self._take_inbox(wait=wait and not self._joining)
        # An idle engine lets all in: no running request would be delayed.
        num_streams = max(0, len(self._deltas) - self._engine.num_waiting)
        for message in self._joining.take(0 if wait else num_streams):
            self._admit(message)
        return took

    def _take_inbox(self, *, wait: bool) -> bool:
        took = False
        while self._running:
            try:
                message = self._inbox.get(block=wait and not took)
            except queue.Empty:
                break
            took = True
            self._num_taken += not isinstance(message, Answered)
            self._take(message)
        return took

    def _feed_jobs(self) -> None:
        if not self._engine.residence.is_ready:
            return  # jobs wait until the engine is awake
        for feed in self._feeds.values():
            part = feed.next_part()
            if part is not None:
                self._engine.add_job(feed.parts[-1], part, first=feed.first, groups=feed.groups)

    def _report(self, outputs: list[RequestOutput], going_on: list[RequestState]) -> None:
        now = time.monotonic()
        idle = not self._is_busy
        stats, job_step = None, 0.0
        if idle or now - self._stats_at >= STATS_SECONDS:
            self._stats_at = now
            stats = self._engine.stats.to_dict()
            job_step, self._job_step_seconds = self._job_step_seconds, 0.0
        tokens, deltas = self._deltas.of(outputs, going_on, self._engine.residence.version)
        self._channel.send(
            Report(
                tokens=tokens,
                deltas=deltas,
                refused=self._refused,
                aborted=self._aborted,
                num_running=self._engine.num_running,
                jobs=self._job_outputs(outputs) if self._job_of else [],
                pulled={feed.job_id: feed.pulled for feed in self._feeds.values()},
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

    def _job_outputs(self, outputs: list[RequestOutput]) -> list[JobOutput]:
        return [
            JobOutput(self._job_of.pop(output.request_id), output)
            for output in outputs
            if output.request_id in self._job_of
        ]

    # ------------------------------------------------------------------------- commands

    @singledispatchmethod
    def _take(self, message: Any) -> None:
        raise TypeError(f"an unknown message: {message!r}")

    @_take.register
    def _add(self, message: Add) -> None:
        self._joining.add(message.request.request_id, message)

    def _admit(self, message: Add) -> None:
        name = message.request.request_id
        self._deltas.begin(name, message.number)
        try:
            self._engine.add_request(message.request, key=message.key, weight=message.weight)
        except OnestemError as error:
            self._deltas.forget(name)
            self._refused[name] = str(error)
        except Exception as error:  # else the next engine would get it, and end alike
            log.error("a request cannot be taken: %s", name, exc_info=error)
            self._deltas.forget(name)
            self._refused[name] = f"the request cannot be taken: {type(error).__name__}: {error}"

    @_take.register
    def _abort(self, message: Abort) -> None:
        name = message.request_id
        if self._joining.remove(name):
            self._aborted[name] = None
            return
        output = self._engine.abort(name)
        self._aborted[name] = last_delta(output, []) if output is not None else None
        self._deltas.forget(name)

    @_take.register
    def _job_requests(self, message: JobRequests) -> None:
        feed = self._feeds.setdefault(message.job_id, JobFeed(message.job_id, message.first))
        for request in message.requests:
            self._job_of[request.request_id] = message.job_id
        feed.extend(message)

    @_take.register
    def _remove_job(self, message: RemoveJob) -> None:
        feed = self._feeds.pop(message.job_id, None)
        for part in feed.parts if feed is not None else ():
            self._engine.remove_job(part)
        for request_id in [i for i, job in self._job_of.items() if job == message.job_id]:
            self._engine.abort(request_id)
            del self._job_of[request_id]

    @_take.register
    def _pin(self, message: Pin) -> None:
        try:
            self._engine.pin_prefix(
                message.name, list(message.token_ids), cache_salt=message.cache_salt
            )
        except OnestemError as error:
            self._refused[message.name] = str(error)

    @_take.register
    def _unpin(self, message: Unpin) -> None:
        if message.name in self._engine.pins:
            self._engine.unpin_prefix(message.name)

    @_take.register
    def _prefetch(self, message: Prefetch) -> None:
        self._engine.prefetch_modules(message.segments, message.cache_salt)

    @_take.register
    def _ask(self, message: Ask) -> None:
        questions = {"snapshot": self._snapshot, "check": self._check, "prefixes": self._prefixes}
        if message.what in questions:
            self._answers.append(Answered(message.token, questions[message.what]()))
            return
        try:
            answer = Answered(message.token, self.orders()[message.what](message.value))
        except OnestemError as error:
            answer = Answered(message.token, error=str(error))
        except Exception as error:
            log.error("an order failed: %s", message.what, exc_info=error)
            answer = Answered(message.token, error=f"{type(error).__name__}: {error}", fault=False)
        self._answers.append(answer)

    def orders(self) -> dict[str, Callable[[Any], Any]]:
        """Orders that the engine can carry out between two steps, each with one value."""
        engine = self._engine
        return {
            "pause": lambda _: self._pause(True),
            "resume": lambda _: self._pause(False),
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "drop_weights": lambda _: engine.residence.drop_weights(),
            "reset_prefix_cache": lambda running: engine.reset_prefix_cache(
                reset_running_requests=running
            ),
            "update_weights": self._update_weights,
        }

    def _pause(self, paused: bool) -> None:
        self._engine.is_paused = paused

    def _sleep(self, level: int) -> None:
        for message in self._joining.take(0):  # they came before: the engine refuses them later
            self._admit(message)
        self._engine.sleep(level)

    def _wake_up(self, tags: Collection[str] | None) -> bool:
        """Wake up; returns whether all is awake."""
        self._engine.wake_up(tags)
        return not self._engine.residence.asleep

    def _update_weights(self, value: tuple[str, int]) -> int:
        from safetensors.torch import load_file  # brings torch

        file, version = value
        return self._engine.update_weights(load_file(file).items(), version)

    @_take.register
    def _answered(self, message: Answered) -> None:
        self._answers.append(message)

    @_take.register
    def _stop(self, message: Stop) -> None:
        self._running = False

    def _snapshot(self) -> dict[str, Any]:
        """The engine's snapshot, with jobs' holdings under the jobs' names."""
        snapshot = snapshot_of(self._engine)
        for holder in snapshot["holders"]:
            holder["name"] = self._job_of.get(holder["name"], holder["name"])
        return snapshot

    def _prefixes(self) -> list[dict[str, Any]]:
        return [asdict(prefix) for prefix in self._engine.prefixes()]

    def _check(self) -> dict[str, Any]:
        """Whether KV memory balances; page counts."""
        error = None
        try:
            self._engine.check()
        except CacheError as reason:
            error = str(reason)
        pool = self._engine.cache.pool
        cached = {page for run in self._engine.cache.runs() for page in run.pages}
        return {
            "error": error,
            "free": pool.num_free,
            "cached": len(cached),
            "held": pool.num_held,
            "total": pool.num_pages,
            "running": self._engine.num_running,
            "waiting": self._engine.num_waiting,
        }


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
    factory, options = channel.receive()
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
        with collecting_less(clean=True):
            worker.run()
    except RankError as error:
        _end_with_rank(channel, str(error))
    except Exception as error:
        if _told(channel, f"{type(error).__name__}: {error}"):
            raise
    os._exit(0)  # nothing to clean up: all state that matters is the server's


if __name__ == "__main__":
    main()

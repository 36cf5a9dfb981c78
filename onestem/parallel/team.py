"""The processes of one model: how they are started, watched and ended.

Each other rank has one socket to rank 0. Rank 0's messages go over it in order; a thread here
reads the replies, sees the end of a process as the end of its socket, and looks whether one is
stopped. When one rank is lost all are ended: a collective of the others would wait for ever.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from onestem.engine.step.launch import make_runner
from onestem.errors import ConfigError, OnestemError, RankError, in_one_line
from onestem.interrupts import uninterrupted
from onestem.models.decoder import Decoder
from onestem.models.ranks import Ranks
from onestem.models.weights import load_decoder
from onestem.ops import AttentionImpl
from onestem.parallel.group import join
from onestem.parallel.lead import LeadRunner
from onestem.parallel.messages import call
from onestem.processes import is_stopped, python_module

log = logging.getLogger(__name__)

# A rank that fails because another has ended may report that before the other's socket closes.
# After this time it is known which came first.
GRACE_SECONDS = 0.3
VERDICT_SECONDS = 3.0  # for the watcher to see why a collective has failed
END_SECONDS = 5.0  # for a process to end by itself, and for NCCL to let go
# A rank that is stopped by a signal for so many looks in a row is lost. One that computes for long
# is not stopped.
LOOK_SECONDS, STOPPED_LOOKS = 1.0, 10
FORKED = "this process is a fork of the one whose ranks these are: make another LLM here"


def check_size(size: int, device: torch.device) -> None:
    """Raise `ConfigError` where there are fewer GPUs than ranks, or ranks cannot meet."""
    if not hasattr(os, "memfd_create"):
        raise ConfigError(f"tensor_parallel_size is {size}, which needs Linux: leave it out")
    if device.type != "cuda":
        return
    first, there = device.index or 0, torch.cuda.device_count()
    if first + size > there:
        where = f" from cuda:{first} on" if first else ""
        raise ConfigError(
            f"tensor_parallel_size is {size}, there are {there - first} GPUs{where}: lower it"
        )


@dataclass(eq=False)
class Member:
    """A rank that is another process."""

    rank: int
    process: subprocess.Popen[bytes]
    socket: Connection


@dataclass(eq=False)
class _Crew:
    """What outlives a `Team` until its processes have ended; the watcher holds only this.

    Attributes:
        bell: the first socket is shut down to end the watcher, which waits for the second too.
        reports: of each kind, what each rank has reported, or the error that it met, by rank.
        death: why the team is of no use any more; None: it works.
        on_death: called with `death`, once, by the watcher.
        changed: notified of changes of `reports` and `death`.
        ranks: rank 0's, on GPUs.
        closes: the model is freed. Else the process itself ends.
    """

    size: int
    members: list[Member] = field(default_factory=list)
    bell: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)
    reports: dict[str, dict[int, Any]] = field(default_factory=dict)
    death: str | None = None
    on_death: Callable[[str], object] = lambda line: None
    changed: threading.Condition = field(default_factory=threading.Condition)
    watcher: threading.Thread | None = None
    owner: int = field(default_factory=os.getpid)
    ranks: Ranks | None = None
    closes: bool = False

    def report(self, rank: int, kind: str, value: Any) -> None:
        """Note what a rank says."""
        with self.changed:
            self.reports.setdefault(kind, {})[rank] = value
            self.changed.notify_all()

    def note_death(self, line: str) -> None:
        """Note why the team ends, and end all ranks: some may wait for one that is gone."""
        with self.changed:
            if self.death is not None:
                return
            self.death = line
            self.changed.notify_all()
        for member in self.members:
            member.process.kill()
        abort = self.leave()
        self.on_death(line)
        for member in self.members:
            with suppress(subprocess.TimeoutExpired):
                member.process.wait(END_SECONDS)
        abort.join(END_SECONDS)

    @property
    def may_leave(self) -> bool:
        """Whether no graph holds a collective of NCCL, which could not end then."""
        return self.closes or (self.ranks is not None and self.ranks.peers is not None)

    def leave(self) -> threading.Thread:
        """Free what waits for other ranks on a GPU, and end the group; returns the thread that does
        so. NCCL may not come back: it waits until no CUDA graph holds a collective of its own."""

        def abort() -> None:
            if self.ranks is None or self.ranks.group is None:
                return
            with suppress(RuntimeError):
                self.ranks.group.abort()

        if self.ranks is not None and self.ranks.peers is not None:
            self.ranks.peers.stop()
        thread = threading.Thread(target=abort, name="onestem-abort", daemon=True)
        thread.start()
        return thread


class Team:
    """Rank 0's side of a model over several devices.

    Args:
        size: ranks, at least 2.
        device: of rank 0; the others take those after it, or the same CPU.

    Attributes:
        ranks: as rank 0.
        members: the other ranks, from rank 1 on.
        free_bytes: on the fullest of the other ranks' devices, when the model is loaded; None on a
            CPU, which they share.

    Raises:
        ConfigError: there are fewer devices.
        RankError: a process has ended; the line names it.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        check_size(size, device)
        self._crew = crew = _Crew(size)
        self.members = crew.members
        self._end = weakref.finalize(self, _end, crew)
        self.free_bytes: int | None = None
        self._sending = threading.Lock()
        try:
            for rank in range(1, size):
                self.members.append(start_rank(rank))
            crew.watcher = threading.Thread(target=_watch, args=(crew,), daemon=True)
            crew.watcher.start()
            place = self.reports("here")[1]
            self.send(call("join", place, size, str(device), torch.get_num_threads()))
            self.ranks = self._meanwhile("joined", lambda: join(place, 0, size, device))[0]
            crew.ranks = self.ranks if device.type == "cuda" else None
        except BaseException:
            self.close()
            raise

    def load_decoder(self, path: str | Path, **options: Any) -> Decoder:
        """`onestem.models.weights.load_decoder`, on each rank for its part, at the same time. An
        error of any ends all: others may wait in a collective for that one."""
        self.send(call("load", str(path), {**options, "device": None}))  # each has its own
        try:
            loaded = self._meanwhile(
                "loaded", lambda: load_decoder(path, ranks=self.ranks, **options)
            )
        except OnestemError:
            self.close()
            raise
        decoder: Decoder = loaded.pop(0)
        self.free_bytes = None if None in loaded.values() else min(loaded.values())
        return decoder

    def _meanwhile(self, kind: str, work: Callable[[], Any]) -> dict[int, Any]:
        """What all others report, and rank 0's result of `work`, which may take minutes; given up
        when a rank ends or reports an error."""

        def run() -> None:
            try:
                value = work()
            except BaseException as error:
                value = error
            self._crew.report(0, kind, value)

        threading.Thread(target=run, name="onestem-load", daemon=True).start()
        return self.reports(kind, self._crew.size)

    def make_runner(self, decoder: Decoder, impl: AttentionImpl, **options: Any) -> LeadRunner:
        """`onestem.engine.step.launch.make_runner`, on each rank."""
        with self.together(call("make_runner", impl.name, options)):
            runner = make_runner(decoder, impl, **options)
        return LeadRunner(runner, self)

    def check(self) -> None:
        """Raise `RankError` where a rank has ended, or this process is a fork."""
        if self._is_fork:
            raise RankError(FORKED)
        if self._crew.death is not None:
            raise RankError(self._crew.death)

    @property
    def _is_fork(self) -> bool:
        return self._crew.owner != os.getpid()

    def send(self, message: bytes) -> None:
        """Send a message to all other ranks, which execute messages in order; from any thread."""
        self.check()
        try:
            with self._sending:
                for member in self.members:
                    member.socket.send_bytes(message)
        except OSError as error:
            raise self.failed(error) from error

    @contextmanager
    def together(self, message: bytes) -> Iterator[None]:
        """Send all the message to do what the block does. Its collectives need every rank, so any
        error inside ends all."""
        try:
            with uninterrupted():
                self.send(message)
                yield
        except Exception as error:
            raise self.failed(error) from error

    def failed(self, error: BaseException) -> RankError:
        """Why a collective or a message has failed: mostly because a rank has ended."""
        if self._is_fork:
            return RankError(FORKED)
        crew = self._crew
        with crew.changed:
            crew.changed.wait_for(lambda: crew.death is not None, VERDICT_SECONDS)
        if crew.death is None:
            why = in_one_line(error)
            crew.note_death(f"rank 0 of {crew.size} failed: {why}: start the engine again")
        assert crew.death is not None
        return RankError(crew.death)

    def reports(self, kind: str, count: int | None = None) -> dict[int, Any]:
        """What ranks report, by rank: the others, or `count` of them.

        Raises:
            OnestemError: the first error that a rank reports, or `RankError`: one has ended.
        """
        crew = self._crew
        count = count or len(self.members)
        with crew.changed:
            reports = crew.reports.setdefault(kind, {})
            crew.changed.wait_for(
                lambda: (
                    crew.death is not None
                    or len(reports) == count
                    or any(isinstance(one, BaseException) for one in reports.values())
                )
            )
            del crew.reports[kind]
        errors = [one for one in reports.values() if isinstance(one, BaseException)]
        for error in errors:
            if isinstance(error, OnestemError):
                raise error
        self.check()
        for error in errors:
            raise self.failed(error) from error
        return reports

    def on_death(self, notify: Callable[[str], object]) -> None:
        """Call a function, from another thread, when a rank has ended; now if one has."""
        self._crew.on_death = notify
        if self._crew.death is not None:
            notify(self._crew.death)

    def close(self) -> None:
        """End the other processes. Closing twice is fine."""
        self._crew.closes = True
        self._end()


def start_rank(rank: int) -> Member:
    """Start the process of a rank other than the first."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            python_module("onestem.parallel.follower", str(theirs.fileno()), str(rank)),
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
        )
    return Member(rank, process, Connection(ours.detach()))


def _watch(crew: _Crew) -> None:
    """Take what ranks report, until one has ended or the team is closed."""
    sockets = {member.socket: member for member in crew.members}
    looks: Counter[Member] = Counter()
    while crew.death is None:
        for ready in wait([*sockets, crew.bell[1]], LOOK_SECONDS):
            if ready is crew.bell[1]:
                return
            assert isinstance(ready, Connection)
            report = _report(ready)
            if report is None or report[0] == "failed":
                crew.note_death(_verdict(crew, sockets[ready], report))
                return
            crew.report(sockets[ready].rank, *report)
        for member in crew.members:
            looks[member] = looks[member] + 1 if is_stopped(member.process.pid) else 0
            if looks[member] == 1:
                log.warning(
                    "%s", _line(crew, member, "is stopped", f"kill -CONT {member.process.pid}")
                )
            if looks[member] == STOPPED_LOOKS:
                crew.note_death(_line(crew, member, "was stopped by a signal"))
                return


def _report(end: Connection) -> tuple[str, Any] | None:
    """The next report; None: the process has ended."""
    try:
        kind, value = end.recv()
    except (EOFError, OSError):
        return None
    return kind, value


def _verdict(crew: _Crew, first: Member, report: tuple[str, Any] | None) -> str:
    """Which rank is lost, in one line. A rank whose collective fails reports it, maybe before the
    end of the rank that it waited for is seen."""
    ended = [first] if report is None else []
    until = time.monotonic() + GRACE_SECONDS
    while not ended and (left := until - time.monotonic()) > 0:
        others = {member.socket: member for member in crew.members if member is not first}
        if not others:
            break
        ended = [
            others[ready]
            for ready in wait([*others], left)
            if isinstance(ready, Connection) and _report(ready) is None
        ]
    one = ended[0] if ended else first
    what = _how(one.process) if ended or report is None else f"failed: {report[1]}"
    return _line(crew, one, what)


def _line(crew: _Crew, one: Member, what: str, way_out: str = "start the engine again") -> str:
    return f"rank {one.rank} of {crew.size} (process {one.process.pid}) {what}: {way_out}"


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return "has closed its socket"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"ended by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"ended by signal {-code}"


def _end(crew: _Crew) -> None:
    """End the processes: each ends when its socket is shut down. Closed alone it would stay open
    in a process that was forked from this one."""
    if crew.owner != os.getpid():
        return  # a fork, whose parent goes on
    crew.bell[0].shutdown(socket.SHUT_RDWR)
    crew.bell[0].close()
    if crew.watcher is not None and crew.watcher is not threading.current_thread():
        crew.watcher.join()
    crew.bell[1].close()
    for member in crew.members:
        with socket.socket(fileno=os.dup(member.socket.fileno())) as same, suppress(OSError):
            same.shutdown(socket.SHUT_RDWR)
        member.socket.close()
    for member in crew.members:
        try:
            member.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            member.process.kill()
            member.process.wait()
    if crew.death is None and crew.may_leave:
        crew.leave().join(END_SECONDS)
    with crew.changed:
        crew.death = crew.death or "the ranks were ended: start the engine again"

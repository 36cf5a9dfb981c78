"""Which grammar is compiled next: they wait in lanes, and keys take turns in each.

The next grammar is one of the key that has had the least of its share of a lane's time (stride
scheduling, as `schedule.backlog.Turns` for requests). So a key with many costly grammars holds back
no other key's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_MANY_LINES = 1_000


class _Line(Generic[T]):
    """What waits for a key, in order. `mark`: how much of its share of the time it has had."""

    def __init__(self, mark: float) -> None:
        self.waiting: dict[T, None] = {}
        self.weight = 1.0
        self.mark = mark
        self.running = 0


class Lane(Generic[T]):
    """Tasks that wait for a few threads, which start with the first. A task may wait in the lines
    of several keys: it is done once, in the first one's turn.

    Args:
        name: of the threads.
        num_threads: tasks at once.
        advance: seconds that a new key counts as having had. So one whose tasks are known to be
            short goes before many new ones.
        work: does a task; must not raise.

    Attributes:
        changed: held while lines change, and told of it.
    """

    def __init__(
        self, name: str, num_threads: int, work: Callable[[T], None], *, advance: float = 0.0
    ) -> None:
        self._name = name
        self._num_threads = num_threads
        self._work = work
        self._advance = advance
        self.changed = threading.Condition()
        self._lines: dict[str, _Line[T]] = {}
        self._now = 0.0
        self._started = 0
        self._closed = False
        self._owner = os.getpid()

    def push(self, task: T, key: str, weight: float) -> None:
        """Have a task done in a key's turn; `weight`: the key's share from now on."""
        with self.changed:
            line = self._lines.get(key)
            if line is None:
                line = self._lines[key] = _Line(self._now + self._advance)
            elif not line.waiting:
                line.mark = max(line.mark, self._now)  # no credit for a pause
            line.weight = weight
            line.waiting[task] = None
            if self._started < self._num_threads and not self._closed:
                name = f"{self._name} {self._started + 1}"
                # One that waits for a process must not keep the program from ending.
                threading.Thread(target=self._run, name=name, daemon=True).start()
                self._started += 1  # not where there is no thread to be had
            self.changed.notify()

    def discard(self, task: T) -> None:
        """Forget a task that nobody has begun."""
        with self.changed:
            self._forget(task)

    def close(self) -> None:
        """Begin no more tasks."""
        if self._owner != os.getpid():
            return  # a fork: a thread that it does not have may hold the lock
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    def _forget(self, task: T) -> None:
        for line in self._lines.values():
            line.waiting.pop(task, None)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            task, line = taken
            began = time.monotonic()
            self._work(task)
            with self.changed:
                line.mark += (time.monotonic() - began) / line.weight
                line.running -= 1
            del task, taken

    def _take(self) -> tuple[T, _Line[T]] | None:
        """The next task and its line, when there is one; None: the lane is closed."""
        with self.changed:
            while not self._closed:
                ready = [line for line in self._lines.values() if line.waiting]
                if ready:
                    line = min(ready, key=lambda line: line.mark)
                    self._now = max(self._now, line.mark)
                    task = next(iter(line.waiting))
                    line.running += 1
                    self._forget(task)
                    self._forget_idle()
                    return task, line
                self.changed.wait()
            return None

    def _forget_idle(self) -> None:
        """Many lines that wait for nothing, and owe nothing, are as good as new ones."""
        if len(self._lines) < _MANY_LINES:
            return
        self._lines = {
            key: line
            for key, line in self._lines.items()
            if line.waiting or line.running or line.mark > self._now
        }

"""Signals at moments when something is half done."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes 45 calls more in each step
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

# Those whose handlers callers set to end a call: Ctrl-C, a time limit, a job that is to stop.
NAMES = ("INT", "TERM", "HUP", "ALRM", "VTALRM", "PROF", "USR1", "USR2")
HELD = tuple(getattr(signal, f"SIG{name}") for name in NAMES if hasattr(signal, f"SIG{name}"))


class Held:
    """Signals with handlers in Python, held back.

    Attributes:
        raised: what a handler raised that was let through.
    """

    def __init__(self, handlers: Mapping[int, Handler]) -> None:
        self.raised: BaseException | None = None
        self._handlers = handlers
        self._caught: dict[int, FrameType | None] = {}
        self._is_lifted = False

    def catch(self, number: int, frame: FrameType | None) -> None:
        """A handler that keeps a signal for `deliver`, unless signals are let through."""
        if self._is_lifted:
            self._handle(number, frame)
        else:
            self._caught[number] = frame

    def deliver(self) -> None:
        """Call the handlers for what has come."""
        if self._caught:
            try:
                self._handle(*self._caught.popitem())
            finally:
                self.deliver()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            self.raised = error
            raise

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Let signals through until the end of the block."""
        self._is_lifted = True
        try:
            self.deliver()
            yield
        finally:
            self._is_lifted = False


@contextlib.contextmanager
def uninterrupted() -> Iterator[Held]:
    """Hold signals back until the end of the block, where their handlers are called.

    Steps take milliseconds of host work between computations that may take seconds; `lifted` lets
    signals through during these. Only the main thread is ever interrupted.
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        found = ((number, _signal.getsignal(number)) for number in HELD)
        handlers = {number: handler for number, handler in found if callable(handler)}
    held = Held(handlers)
    try:
        for number in handlers:
            _signal.signal(number, held.catch)
        yield held
    finally:
        for number, handler in handlers.items():
            _signal.signal(number, handler)
        held.deliver()


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Exit on SIGTERM, so that servers that were started and temporary files go too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

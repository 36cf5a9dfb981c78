"""Signals at moments when something is half done."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["Held", "exit_on_sigterm", "uninterrupted"]


class Held:
    """SIGINT, held back."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._caught: list[FrameType | None] = []
        self._is_lifted = False

    def catch(self, number: int, frame: FrameType | None) -> None:
        if self._is_lifted:
            self._handler(number, frame)
        else:
            self._caught.append(frame)

    def deliver(self) -> None:
        """Call the handler for what has come."""
        if self._caught:
            self._handler(signal.SIGINT, self._caught.pop())

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Let SIGINT through until the end of the block."""
        self._is_lifted = True
        try:
            self.deliver()
            yield
        finally:
            self._is_lifted = False


@contextlib.contextmanager
def uninterrupted() -> Iterator[Held]:
    """Hold SIGINT back until the end of the block, where its handler is called.

    Steps take milliseconds of host work between computations that may take seconds; `lifted` lets
    an interrupt through during these. Only the main thread is ever interrupted.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield Held(lambda number, frame: None)
        return
    held = Held(handler)
    signal.signal(signal.SIGINT, held.catch)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, handler)
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

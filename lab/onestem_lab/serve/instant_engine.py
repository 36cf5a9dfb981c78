"""An engine process that computes nothing: a request gets a token at once, and more in turns."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onestem.options import EngineOptions
from onestem.server.link.channel import Channel
from onestem.server.link.messages import (
    Abort,
    Add,
    Answered,
    Ask,
    Begun,
    Facts,
    Ready,
    Report,
    Stop,
    Tokens,
)
from onestem_lab.serve.chunks import LIMIT

WORDS = (" the", " of", " stone", "\n", " answer", " \u00e9t\u00e9", ' "so"', " and")


class InstantEngine:
    """Sends tokens as an engine does, as fast as they are taken.

    Args:
        channel: to the server.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lanes: dict[str, tuple[int, int]] = {}  # id -> its lane, and its number
        self._num_taken = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Say that the engine is ready."""
        self._channel.receive()  # what an engine is made of
        options = EngineOptions(device="cpu", dtype="float32", max_model_len=2_000_000)
        facts = Facts(options=options, vocab_size=2_560, kv_tokens=4_000_000, kv_bytes_per_token=1)
        self._channel.send(Ready(facts, 0))
        threading.Thread(target=self._receive, daemon=True).start()

    def turn(self, lane: int, steps: int) -> None:
        """Send so many tokens to each stream of a lane."""
        for step in range(steps):
            with self._lock:
                self._send([number for of, number in self._lanes.values() if of == lane], step)

    def _send(self, requests: Sequence[int], step: int) -> None:
        """A token for each of the requests."""
        tokens = Tokens(
            requests=array("q", requests),
            indices=array("q", bytes(8 * len(requests))),
            token_ids=array("q", requests),
            texts=[WORDS[(step + number) % len(WORDS)] for number in requests],
        )
        report = Report(
            tokens=tokens, num_running=len(self._lanes), num_taken=self._num_taken, busy=True
        )
        self._channel.send(report)

    def _receive(self) -> None:
        with contextlib.suppress(EOFError):
            while not isinstance(message := self._channel.receive(), Stop):
                with self._lock:
                    self._num_taken += 1
                    self._take(message)
        os._exit(0)

    def _take(self, message: Any) -> None:
        if isinstance(message, Add):
            request_id, limit = message.request.request_id, message.request.params.max_tokens
            self._channel.send(Begun([request_id]))
            self._lanes[request_id] = (limit or 0) - LIMIT, message.number
            self._send([message.number], 0)
        elif isinstance(message, Abort):
            self._lanes.pop(message.request_id, None)
        elif isinstance(message, Ask):
            value: Any = None if message.what == "validate" else {}
            self._channel.send(Answered(message.token, value))


def main() -> None:
    number, orders, steps = sys.argv[1:]
    engine = InstantEngine(Channel(socket.socket(fileno=int(number))))
    engine.begin()
    with Path(orders).open("rb", buffering=0) as lanes:
        while lane := lanes.read(1):
            engine.turn(lane[0], int(steps))


if __name__ == "__main__":
    main()

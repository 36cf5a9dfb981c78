"""An engine process that computes nothing: each stream gets a token at a fixed pace."""

from __future__ import annotations

import socket
import sys
import threading
import time
from array import array
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
from onestem_lab.serve.chunks import PACE

WORDS = (" the", " of", " stone", "\n", " answer", " \u00e9t\u00e9", ' "so"', " and")


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    channel.receive()  # what an engine is made of
    options = EngineOptions(device="cpu", dtype="float32", max_model_len=2_000_000)
    channel.send(
        Ready(
            Facts(
                options=options, vocab_size=2_560, kv_tokens=4_000_000,
                kv_bytes_per_token=1,
            ),
            0,
        )
    )  # fmt: skip
    streams: dict[str, int] = {}
    num_taken = 0
    lock = threading.Lock()

    def receive() -> None:
        nonlocal num_taken
        while True:
            message = channel.receive()
            with lock:
                num_taken += 1
                if isinstance(message, Add):
                    channel.send(Begun([message.request.request_id]))
                    streams[message.request.request_id] = message.number
                elif isinstance(message, Abort):
                    streams.pop(message.request_id, None)
                elif isinstance(message, Ask):
                    value: Any = None if message.what == "validate" else {}
                    channel.send(Answered(message.token, value))
                elif isinstance(message, Stop):
                    return

    threading.Thread(target=receive, daemon=True).start()
    began, sent, step = time.monotonic(), 0, 0
    while True:
        with lock:
            numbers = array("q", streams.values())
            step += 1
            texts = [WORDS[(step + number) % len(WORDS)] for number in numbers]
            zeros = array("q", bytes(8 * len(numbers)))
            tokens = Tokens(requests=numbers, indices=zeros, token_ids=numbers, texts=texts)
            report = Report(
                tokens=tokens, num_running=len(numbers), num_taken=num_taken, busy=True
            )  # fmt: skip
            channel.send(report)
        sent += len(numbers)
        late = began + sent / PACE - time.monotonic()
        time.sleep(max(late, 0.001) if numbers else 0.01)
        if not numbers:
            began, sent = time.monotonic(), 0


if __name__ == "__main__":
    main()

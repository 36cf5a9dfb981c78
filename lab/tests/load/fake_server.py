"""An OpenAI server of known latencies, behind httpx2's transport: no sockets, no threads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2

Spoil = Callable[[list[bytes]], list[bytes]]


class FakeServer(httpx2.AsyncBaseTransport):
    """Answers completions: the first token after `first` seconds, one more every `between`.

    Attributes:
        slots: how many requests are computed at a time; the others wait (a queue that grows).
        spoil: what becomes of the events of request number n (in order of arrival).
        received: (time, body) of each request.
    """

    def __init__(self, first: float = 0.5, between: float = 0.1, slots: int = 10**6) -> None:
        self.first, self.between = first, between
        self.slots = asyncio.Semaphore(slots)
        self.spoil: dict[int, Spoil] = {}
        self.refuse: set[int] = set()
        self.received: list[tuple[float, dict[str, Any]]] = []
        self.open = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        number = len(self.received)
        body = json.loads(await request.aread())
        self.received.append((asyncio.get_running_loop().time(), body))
        if number in self.refuse:
            return httpx2.Response(429, json={"error": {"message": "queue is full"}})
        return httpx2.Response(200, stream=_Stream(self, number, body))


class _Stream(httpx2.AsyncByteStream):
    def __init__(self, server: FakeServer, number: int, body: dict[str, Any]) -> None:
        self.server, self.number, self.body = server, number, body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        server = self.server
        events = events_of(self.number, self.body)
        events = server.spoil.get(self.number, lambda given: given)(events)
        async with server.slots:
            server.open += 1
            try:
                for position, event in enumerate(events):
                    if position < self.body["max_tokens"]:
                        await asyncio.sleep(server.between if position else server.first)
                    yield event
            finally:
                server.open -= 1


def events_of(number: int, body: dict[str, Any]) -> list[bytes]:
    """A token a chunk, then the usage, then [DONE], as vLLM streams them."""
    count = body["max_tokens"]
    prompt = len(body.get("prompt", ""))
    chunks = [_chunk(number, token, count) for token in range(count)]
    chunks.append(
        {
            "id": f"cmpl-{number}",
            "choices": [],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": count,
                "prompt_tokens_details": {"cached_tokens": prompt // 2},
            },
        }
    )
    return [b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks] + [
        b"data: [DONE]\n\n"
    ]


def _chunk(number: int, token: int, count: int) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": f" {token}",
        "token_ids": [token],
        "logprobs": {"text_offset": [2 * token]},
        "finish_reason": "length" if token == count - 1 else None,
    }
    return {"id": f"cmpl-{number}", "choices": [choice]}

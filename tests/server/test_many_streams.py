"""Many streams at once: each ends once, in order, with its own tokens; clients leave at random."""

from __future__ import annotations

import asyncio
import json
import random
import resource

import pytest

from tests.server.harness import running

STREAMS = 500
LEAVERS = 200
SLOW = 25
TOKENS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_model):
    # Both ends of each connection are in this process.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4 * STREAMS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4 * STREAMS, hard))
    with running(tmp_path_factory.mktemp("many"), model=tiny_model) as server:
        yield server


class Reader:
    """One client of a stream, with its own prompt."""

    def __init__(self, server, number: int, rng: random.Random) -> None:
        self.number = number
        self.leaves_after = rng.randrange(TOKENS) if number < LEAVERS else None
        self.is_slow = number >= STREAMS - SLOW
        self.chunks: list[dict] = []
        self.ended = 0
        self._host, self._port = server.url.removeprefix("http://").split(":")

    def _request(self) -> bytes:
        prompt = [7, *range(10, 40), 3 + self.number // 25, 3 + self.number % 25]
        body = {"prompt": prompt, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        raw = json.dumps({**body, "return_token_ids": True, "seed": self.number}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        return head.encode() + raw

    async def run(self, others: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection(self._host, int(self._port), limit=1 << 20)
        writer.write(self._request())
        if self.is_slow:
            await others.wait()  # reads nothing before all the others have ended
        while not self.ended:
            if self.leaves_after is not None and len(self.chunks) > self.leaves_after:
                break
            line = await reader.readline()
            if line == b"data: [DONE]\n":
                self.ended += 1
            elif line.startswith(b"data: "):
                self.chunks.append(json.loads(line.removeprefix(b"data: ")))
        writer.close()

    @property
    def tokens(self) -> list[int]:
        return [t for chunk in self.chunks for t in chunk["choices"][0]["token_ids"]]


def test_every_stream_ends_once_in_order_with_its_own_tokens(server):
    rng = random.Random(5)
    readers = [Reader(server, number, rng) for number in range(STREAMS)]

    async def everyone() -> None:
        others = asyncio.Event()
        slow = [asyncio.create_task(reader.run(others)) for reader in readers[-SLOW:]]
        async with asyncio.timeout(60):
            await asyncio.gather(*(reader.run(others) for reader in readers[:-SLOW]))
            others.set()
            await asyncio.gather(*slow)

    asyncio.run(everyone())
    server.until(lambda: not len(server.service.client.requests))
    for reader in readers[LEAVERS:]:
        name = f"{reader.chunks[0]['id']}-0"
        assert reader.tokens == server.launcher.finished[name][0]
        assert len(reader.tokens) == TOKENS
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in reader.chunks]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
        assert reader.ended == 1
    assert len({reader.chunks[0]["id"] for reader in readers}) == STREAMS
    assert server.check()["held"] == 0

"""What tenants do who want others to wait, or the server to run out of memory.

Whatever they get is right: an answer, a refusal, or that their time is over. It must be one of
these, and come.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import httpx2

from onestem_lab.serve.hostile_bodies import DOORS, bomb, long_text
from onestem_lab.serve.hostile_hand import Hand, bad_outcome, dumped
from onestem_lab.serve.hostile_pool import CHATS, COMPLETIONS, text
from onestem_lab.serve.hostile_schemas import costly_schema, format_of
from onestem_lab.serve.hostile_wire import Connection, post, received

__all__ = ["ATTACKS"]

Json = dict[str, Any]

ANSWERED = (200, 400, 413, 429, 504)
COMPILE_SECONDS = 5.0  # that a request with a costly schema has
MANY = 64  # connections of one attack


async def costly_schemas(hand: Hand) -> None:
    """Some in a row, a few of which nobody waits for."""
    for _ in range(hand.rng.randint(1, 8)):
        await _costly(hand)


async def many_costly_schemas(hand: Hand) -> None:
    """Some at once."""
    await asyncio.gather(*(_costly(hand) for _ in range(hand.rng.choice([4, 8, 16]))))


async def _costly(hand: Hand) -> None:
    body = {
        "prompt": text(hand.rng, 1, 9),
        "max_tokens": hand.rng.randint(1, 12),
        "timeout": COMPILE_SECONDS,
        "response_format": format_of(costly_schema(hand.rng)),
    }
    if hand.rng.random() < 0.2:
        await _leave(hand, post(COMPLETIONS, hand.secret, body))
    else:
        hand.expect(await hand.http.post(COMPLETIONS, json=body), *ANSWERED)


async def _leave(hand: Hand, request: bytes) -> None:
    """Send it and be gone soon."""
    async with Connection(hand.site.url) as connection:
        await connection.send(request)
        await hand.pause(hand.rng.choice([0, 0.1, 1.0]))
        if hand.rng.random() < 0.5:
            connection.reset()
    hand.note("left")


async def many_logprobs(hand: Hand) -> None:
    """The most sequences with the most log-probabilities."""
    body: Json = {
        "n": hand.rng.choice([64, 256, 1024, 1024]),
        "max_tokens": hand.rng.choice([1, 2, 8]),
        "temperature": 1.0,
        "stream": hand.rng.random() < 0.3,
        "timeout": 60,
    }
    if hand.rng.random() < 0.5:
        body |= {"prompt": text(hand.rng, 1, 9), "logprobs": 100}
        path = COMPLETIONS
    else:
        message = {"role": "user", "content": text(hand.rng, 1, 9)}
        body |= {"messages": [message], "logprobs": True, "top_logprobs": 100}
        path = CHATS
    if hand.rng.random() < 0.2:
        await _leave(hand, post(path, hand.secret, body))
    else:
        hand.expect(await hand.http.post(path, json=body), *ANSWERED)


async def long_texts(hand: Hand) -> None:
    """At any door."""
    path, make = hand.rng.choice(DOORS)
    body = make(long_text(hand.rng))
    one = dataclasses.replace(hand, kind=f"{hand.kind}: {path}")
    put = path.endswith("/long")
    # A prefix or a schema may be taken by a key's other door.
    answer = await (hand.http.put if put else hand.http.post)(path, json=body)
    if one.expect(answer, *ANSWERED) and put:
        one.expect(await hand.http.delete(path), 200, 404)


async def bombs(hand: Hand) -> None:
    """JSON that takes more to read than to write."""
    kind, path, body = bomb(hand.rng)
    headers = {"content-type": "application/json"}
    one = dataclasses.replace(hand, kind=f"{hand.kind}: {kind}")
    one.expect(await hand.http.post(path, content=body, headers=headers), *ANSWERED)


async def slow_bodies(hand: Hand) -> None:
    """Many that come a byte at a time, and are all left."""
    body = dumped({"prompt": long_text(hand.rng, 20_000), "max_tokens": 2})
    request = post(COMPLETIONS, hand.secret, body)
    await asyncio.gather(*(_send_slowly(hand, request) for _ in range(MANY)))
    hand.note("left")


async def _send_slowly(hand: Hand, request: bytes) -> None:
    with suppress(OSError):  # the server may have had enough of it
        async with Connection(hand.site.url) as connection:
            await connection.send(request[:-40])
            for byte in request[-40:-1]:
                await connection.send(bytes([byte]))
                await hand.pause(0.1)


async def slow_and_whole(hand: Hand) -> None:
    """Many long bodies at once, all of them whole in the end."""
    body = dumped({"prompt": long_text(hand.rng), "max_tokens": 2, "timeout": 30})
    request = post(COMPLETIONS, hand.secret, body)
    await asyncio.gather(*(_send_whole(hand, request) for _ in range(MANY // 8)))


async def _send_whole(hand: Hand, request: bytes) -> None:
    try:
        async with Connection(hand.site.url) as connection:
            await connection.send_slowly(request, hand.rng)
            (answer,) = received(await connection.rest())
    except (httpx2.HTTPError, OSError, ValueError) as error:
        hand.note("error", error=f"{type(error).__name__}: {error}"[:500])
        return
    if answer.status in ANSWERED:
        hand.note(str(answer.status))
    else:
        bad = bad_outcome(answer.status, b"engine_down" in answer.body)
        hand.note(bad, answer=answer.body[:500].decode("latin-1"))


# What attackers do, and how often.
ATTACKS: Mapping[Callable[[Hand], Awaitable[None]], int] = {
    costly_schemas: 30,
    many_costly_schemas: 15,
    many_logprobs: 25,
    long_texts: 40,
    bombs: 40,
    slow_bodies: 5,
    slow_and_whole: 5,
}

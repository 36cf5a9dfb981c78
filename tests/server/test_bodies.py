"""Large bodies have room before they are read: how many at once, in which order, whose."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import AsyncExitStack

import pytest
from starlette.requests import Request
from starlette.types import Message

from onestem.server.api import bodies as module
from onestem.server.api.bodies import SMALL_BYTES, Bodies
from onestem.server.errors import ApiError
from tests.server.harness import running

LARGE = 100_000


class Takers:
    """Tasks that take room and keep it until they are let go."""

    def __init__(self, bodies: Bodies) -> None:
        self.inside: list[str] = []
        self._bodies = bodies
        self._tasks: dict[str, tuple[asyncio.Task, asyncio.Event]] = {}

    async def come(self, name: str, key: str, size: int = LARGE) -> None:
        go = asyncio.Event()

        async def take() -> None:
            async with self._bodies.room(key, size):
                self.inside.append(name)
                await go.wait()
            self.inside.remove(name)

        self._tasks[name] = asyncio.create_task(take()), go
        await settle()

    async def leave(self, name: str) -> None:
        task, go = self._tasks.pop(name)
        go.set()
        await task
        await settle()

    async def give_up(self, name: str) -> None:
        task, _ = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await settle()


async def settle() -> None:
    """Let all tasks go as far as they can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_as_many_as_there_is_room_for_in_order_and_one_of_each_key():
    async def main() -> None:
        bodies = Bodies(limit=LARGE, most=2 * LARGE)
        takers = Takers(bodies)
        for name in ("a1", "a2", "a3", "a4"):
            await takers.come(name, "a")
        assert takers.inside == ["a1", "a2", "a3"]  # its own room, and all that keys share
        await takers.come("b1", "b")
        assert takers.inside == ["a1", "a2", "a3", "b1"]
        await takers.come("b2", "b")
        await takers.come("tiny", "c", SMALL_BYTES)
        assert takers.inside == ["a1", "a2", "a3", "b1", "tiny"]
        await takers.leave("a2")  # a4 came before b2
        assert takers.inside == ["a1", "a3", "b1", "tiny", "a4"]
        await takers.leave("b1")  # the key's own
        assert takers.inside == ["a1", "a3", "tiny", "a4", "b2"]
        for name in ("a1", "a3", "a4", "b2", "tiny"):
            await takers.leave(name)
        assert (bodies.held, bodies.own, bodies.waiting) == (0, set(), {})

    asyncio.run(main())


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_large_one_is_not_passed_for_ever(gives_up):
    """And who gives up lets those behind it in."""

    async def main() -> None:
        takers = Takers(Bodies(limit=3 * LARGE, most=3 * LARGE))
        for name in ("own", "1", "2"):
            await takers.come(name, "a")
        await takers.come("large", "a", 3 * LARGE)
        await takers.come("late", "a")  # it would fit
        assert takers.inside == ["own", "1", "2"]
        if gives_up:
            await takers.give_up("large")
            assert takers.inside == ["own", "1", "2", "late"]
        else:
            await takers.leave("1")
            await takers.leave("2")
            assert takers.inside == ["own", "large"]

    asyncio.run(main())


def test_who_gives_up_leaves_no_trace():
    async def main() -> None:
        bodies = Bodies(limit=LARGE, most=LARGE)
        takers = Takers(bodies)
        for name in ("1", "2", "3", "4"):
            await takers.come(name, "a")
        await takers.give_up("3")
        await takers.give_up("1")
        assert takers.inside == ["1", "2", "4"]  # "1" was cut off inside: it is gone all the same
        await takers.give_up("2")
        await takers.give_up("4")
        assert (bodies.held, bodies.own, bodies.waiting) == (0, set(), {})

    asyncio.run(main())


@pytest.mark.parametrize("has_room", [False, True])
def test_one_that_gives_up_as_room_becomes_free(has_room):
    """It has not run since, and takes no room. `has_room`: it was let in before it gave up."""

    async def enter(bodies: Bodies) -> None:
        async with bodies.room("a", LARGE):
            raise AssertionError("it gave up")

    async def main() -> None:
        bodies = Bodies(limit=LARGE, most=LARGE)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(bodies.room("a", LARGE))
            await stack.enter_async_context(bodies.room("a", LARGE))
            waiting = asyncio.create_task(enter(bodies))
            await settle()
            if not has_room:
                waiting.cancel()
        if has_room:
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (bodies.held, bodies.own, bodies.waiting) == (0, set(), {})

    asyncio.run(main())


def test_what_is_larger_than_all_room_takes_all_of_it():
    async def main() -> None:
        takers = Takers(Bodies(limit=LARGE, most=LARGE))
        await takers.come("own", "a")
        await takers.come("upload", "a", 2 * LARGE)
        assert takers.inside == ["own", "upload"]

    asyncio.run(main())


def test_one_that_is_too_long_waits_for_no_room():
    async def come() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def main() -> None:
        bodies = Bodies(limit=LARGE, most=LARGE)
        headers = [(b"content-length", b"%d" % (LARGE + 1))]
        call = Request({"type": "http", "headers": headers}, come)
        async with bodies.room("a", LARGE), bodies.room("a", LARGE), asyncio.timeout(10):
            with pytest.raises(ApiError) as error:
                async with bodies.read(call, "a"):
                    pass
        assert error.value.status == 413

    asyncio.run(main())


def test_who_waits_too_long_is_told(monkeypatch):
    monkeypatch.setattr(module, "BODY_SECONDS", 0.01)

    async def main() -> None:
        bodies = Bodies(limit=LARGE, most=LARGE)
        async with bodies.room("a", LARGE), bodies.room("a", LARGE):
            with pytest.raises(ApiError) as error:
                async with bodies.room("a", LARGE):
                    pass
        assert (error.value.status, error.value.code) == (503, "bodies_full")
        assert error.value.headers["Retry-After"] == "5"
        assert error.value.message.startswith("bodies of 100000 bytes are being read, limit is ")
        assert (bodies.held, bodies.own, bodies.waiting) == (0, set(), {})

    asyncio.run(main())


def begin(server, key: str, size: int) -> socket.socket:
    """A call whose body does not come."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def test_slow_uploads_of_a_key_and_bodies_of_another(tmp_path, tiny_model):
    """Some bytes are declared and never come; they take room, but not that of others."""
    keys = tmp_path / "keys"
    keys.write_text("slow:slow-key-0\nother:other-key\n")
    settings = {"max_body": LARGE, "max_bodies": LARGE, "api_key_file": keys}
    body = {"prompt": "abc", "max_tokens": 1, "user": "u" * (LARGE - 200)}
    assert SMALL_BYTES < len(json.dumps(body)) <= LARGE
    with running(tmp_path / "state", model=tiny_model, **settings) as server:
        bodies = server.server.config.app.state.bodies
        slow = [begin(server, "slow-key-0", LARGE) for _ in range(20)]
        server.until(lambda: len(bodies.waiting) == 18)
        assert bodies.held == LARGE
        with server.http("other-key") as http:
            for _ in range(3):
                assert http.post("/v1/completions", json=body).status_code == 200
        with server.http("slow-key-0") as http:  # a small one waits for nobody
            small = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1})
            assert small.status_code == 200
        for connection in slow:
            connection.close()
        server.until(lambda: not bodies.held and not bodies.own and not bodies.waiting)
        with server.http("slow-key-0") as http:
            assert http.post("/v1/completions", json=body).status_code == 200
        server.check()

"""An engine that has work and says nothing any more is noticed, ended and started again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from types import SimpleNamespace

import pytest

from onestem.options import EngineOptions
from onestem.server.errors import EngineDownError
from onestem.server.link.client import EngineClient
from onestem.server.link.process import EngineProcess
from onestem.server.link.watchdog import Watchdog


@pytest.fixture
def clock():
    return SimpleNamespace(now=50.0)


@pytest.fixture
def dog(clock):
    """With an interval of 1 s."""
    return Watchdog(8.0, lambda: clock.now)


def ticks(dog, clock, count: int) -> list[bool]:
    told = []
    for _ in range(count):
        clock.now += 1.0
        told.append(dog.tick())
    return told


def test_an_idle_engine_may_be_silent(dog, clock):
    assert ticks(dog, clock, 100) == [False] * 100
    dog.note_sent()
    dog.note_report(1, busy=False)
    assert ticks(dog, clock, 100) == [False] * 100


def test_an_engine_that_owes_a_report_may_not(dog, clock):
    dog.note_sent()
    assert ticks(dog, clock, 9) == [False] * 7 + [True] * 2
    dog.note_report(1, busy=True)  # it has taken it, and computes
    assert ticks(dog, clock, 8) == [False] * 7 + [True]
    dog.note_report(1, busy=False)
    assert not any(ticks(dog, clock, 20))


def test_silence_counts_from_the_command_on(dog, clock):
    ticks(dog, clock, 100)
    dog.note_sent()
    assert ticks(dog, clock, 8) == [False] * 7 + [True]


def test_reports_of_earlier_commands_are_not_enough(dog, clock):
    dog.note_sent()
    dog.note_sent()
    dog.note_report(1, busy=False)
    assert ticks(dog, clock, 8)[-1]
    dog.restart()
    assert not any(ticks(dog, clock, 20))


def test_a_pause_of_the_server_is_no_silence_of_the_engine(dog, clock):
    """What the engine said meanwhile is not read yet."""
    dog.note_sent()
    clock.now += 3600.0
    assert not dog.tick()
    assert ticks(dog, clock, 6) == [False] * 5 + [True]


def test_without_a_limit_nothing_is_stuck(clock):
    dog = Watchdog(0, lambda: clock.now)
    dog.note_sent()
    clock.now += 1e9
    assert not dog.tick()


def test_without_a_limit_nobody_looks():
    async def live() -> None:
        launcher = EngineProcess(EngineOptions(), "tests.server.fake_engine:load")
        client = EngineClient(launcher, 4, engine_timeout=0)
        dog = client.supervisor.watchdog
        dog.tick = lambda: pytest.fail("a look at an engine that may be silent")
        await client.start()  # takes longer than a thousand looks
        await client.stop()

    asyncio.run(live())


def test_a_stopped_engine_is_killed_and_started_again(caplog):
    caplog.set_level(logging.INFO, "onestem.server")

    async def live() -> None:
        launcher = EngineProcess(EngineOptions(), "tests.server.fake_engine:load")
        client = EngineClient(launcher, 4, engine_timeout=0.2)
        await client.start()
        first = client.supervisor.pid
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(EngineDownError):
            await client.ask("prefixes")
        assert "silent for 0.2 s" in client.supervisor.error
        with pytest.raises(EngineDownError, match="the engine is"):
            client.supervisor.check_up()
        async with asyncio.timeout(60):
            while client.supervisor.state != "running":
                await asyncio.sleep(0.01)
        assert client.supervisor.pid != first
        assert client.supervisor.restarts == 1
        seen = [record.getMessage() for record in caplog.records]
        assert seen == ["engine_ready", "engine_stuck", "engine_down", "engine_ready"]
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        await client.stop()

    asyncio.run(live())

"""Traffic against a server: its clients and attackers, its restarts, and who looks after it."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from onestem.errors import ConfigError
from onestem.options import parse_memory
from onestem_lab.load.client import open_client
from onestem_lab.load.figures import distribution
from onestem_lab.serve.hostile_attacks import ATTACKS
from onestem_lab.serve.hostile_batches import Batches, judge
from onestem_lab.serve.hostile_hand import Hand, Site, Tally
from onestem_lab.serve.hostile_memory import growth, memory_of, parent
from onestem_lab.serve.hostile_pool import Case
from onestem_lab.serve.hostile_probes import Probes, Windows
from onestem_lab.serve.hostile_requests import ACTIONS, make_own, tidy
from onestem_lab.serve.hostile_rest import rest
from onestem_lab.serve.hostile_server import Restarts, Server
from onestem_lab.serve.hostile_setting import ATTACKERS, KEYS, MAX_BODY, PROBE, SECRETS, Setting
from onestem_lab.serve.service import state

__all__ = ["traffic"]

Json = dict[str, Any]
Answered = Callable[[Sequence[Case]], list[Case]]
Action = Callable[[Hand], Awaitable[None]]

LOOK_SECONDS = 5.0
MOST_LOOKS = 120  # that are written down
RESTARTS_UNTIL = 1 / 3  # of the run; the rest is one life, over which memory must stay
LULL_SECONDS = 20.0  # at most, in which clients wait until a batch is under way


async def traffic(
    url: str,
    pool: Sequence[Case],
    setting: Setting,
    answered: Answered,
    server: Server | None = None,
) -> Json:
    """Ask a server, and say what became of it.

    Args:
        answered: gives cases the answers that they get alone.
        server: what runs at `url`; None: it is never restarted.
    """
    async with _open_site(url, setting.hang) as site:
        return await Run(site, pool, setting, answered, server).whole()


@asynccontextmanager
async def _open_site(url: str, hang: float) -> AsyncIterator[Site]:
    """A server with a client for each of its keys."""
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(open_client(url, key, hang))
            for name, key in SECRETS.items()
        }
        yield Site(url, SECRETS, clients, MAX_BODY)


class Run:
    """Traffic against a server, and what became of it.

    Attributes:
        supervision: what is seen of the server meanwhile.
    """

    def __init__(
        self,
        site: Site,
        pool: Sequence[Case],
        setting: Setting,
        answered: Answered,
        server: Server | None,
    ) -> None:
        self.site, self.pool, self.setting = site, pool, setting
        self.tally = Tally()
        self.over = asyncio.Event()
        self.began = time.monotonic()
        attacker = ATTACKERS[0] if setting.attackers else None
        self.batches = Batches(site, pool, setting.seed, PROBE, attacker)
        self.windows = Windows(self.began, setting.window if setting.attackers else 0)
        self.probes = Probes(self.windows)
        self.restarts: Restarts | None = None
        if server is not None and setting.restart_every:
            self.restarts = Restarts(server, site.outages, site.operator, self._tidy)
        self.supervision = Supervision(site, self.tally, self.restarts, self.began)
        self._answered = answered
        self._traffic_is_on = asyncio.Event()  # off: clients wait, for batches to get on
        self._traffic_is_on.set()

    async def whole(self) -> Json:
        """All of it: preparations, traffic, and what is left behind."""
        for client in self.site.clients.values():
            await make_own(client)
        await self.supervision.look()
        await self._traffic()
        seconds = time.monotonic() - self.began
        after: Json = {"server": "gone"}
        if await self.supervision.look():
            await self.batches.rest()
            after = await rest(self.site, self.pool)
        return self._told(seconds, after)

    async def _traffic(self) -> None:
        beside = [self.supervision.watch(self.over), self.batches.go_on(self.over), self._probe()]
        beside += [self._attack(number) for number in range(self.setting.attackers)]
        if self.restarts is not None:
            beside.append(self._restart(self.restarts))
        async with asyncio.TaskGroup() as group:
            for task in beside:
                group.create_task(task)
            await asyncio.gather(*map(self._client, range(self.setting.clients)))
            self.over.set()

    # ------------------------------------------------------------------------- clients

    async def _client(self, number: int) -> None:
        for step in self._steps():
            await self._traffic_is_on.wait()
            rng = self._rng(number, step)
            await self._step(number, step, rng, _drawn(rng, ACTIONS), rng.choice(KEYS))

    async def _attack(self, number: int) -> None:
        client, step = self.setting.clients + number, 0
        while await self.windows.wait(self.over):
            rng = self._rng(client, step)
            key, action = rng.choice(ATTACKERS), _drawn(rng, ATTACKS)
            await self._step(client, step, rng, action, key, "attack: ")
            step += 1

    async def _probe(self) -> None:
        client, step = self.setting.clients + self.setting.attackers, 0
        while not self.over.is_set():
            action = (self.probes.plain, self.probes.small)[step % 2]
            await self._step(client, step, self._rng(client, step), action, PROBE, "probe: ")
            await self.probes.pause()
            step += 1

    def _rng(self, client: int, step: int) -> random.Random:
        return random.Random(f"{self.setting.seed} {client} {step}")

    def _steps(self) -> Iterator[int]:
        """Steps of one client, until the time is over or the server is gone."""
        requests = self.setting.requests
        most = sys.maxsize if requests is None else -(-requests // self.setting.clients)
        for step in range(most):
            if (requests is None and self._progress > 1) or self.over.is_set():
                return
            yield step

    @property
    def _progress(self) -> float:
        """How much of the run is over; 1: all of it."""
        if self.setting.requests is not None:
            return self.tally.requests / max(self.setting.requests, 1)
        assert self.setting.minutes is not None
        return (time.monotonic() - self.began) / (60 * self.setting.minutes)

    async def _step(
        self, client: int, step: int, rng: random.Random, action: Action, key: str, of: str = ""
    ) -> None:
        place = {"seed": self.setting.seed, "client": client, "step": step}
        kind = of + getattr(action, "__name__", "").replace("_", " ")
        hand = Hand(self.site, self.pool, self.tally, rng, place, kind, key, self.setting.pace)
        at = round(hand.began - self.began, 3)
        self.tally.recent.append({**place, "action": kind, "at": at})
        try:
            async with asyncio.timeout(self.setting.hang):
                await action(hand)
        except TimeoutError:
            hand.note("hung", seconds=self.setting.hang)
        except (httpx2.HTTPError, OSError, ValueError, LookupError) as error:
            hand.note("error", error=f"{type(error).__name__}: {error}"[:500])
        if self.site.outages.is_on:
            await asyncio.sleep(1.0)  # rather than being refused as fast as can be

    # ------------------------------------------------------------------------- restarts

    async def _restart(self, restarts: Restarts) -> None:
        try:
            await restarts.go_on(self._next_restart)
        except (ConfigError, httpx2.HTTPError, OSError, ValueError, LookupError) as error:
            restarts.note("restart", f"{type(error).__name__}: {error}")
            self.over.set()

    async def _next_restart(self) -> bool:
        """Until it is time for the next; every second one comes when a batch is under way, whose
        lines get little room while clients ask."""
        assert self.restarts is not None
        until = time.monotonic() + self.setting.restart_every
        while time.monotonic() < until or self.site.outages.is_on:
            if self.over.is_set():
                return False
            await asyncio.sleep(0.1)
        if self._progress > RESTARTS_UNTIL and self.restarts.counts:
            return False
        if self.restarts.counts.total() % 2 == 0:
            await self._lull()
        self.batches.note_outage()
        return True

    async def _lull(self) -> None:
        until = time.monotonic() + LULL_SECONDS
        self._traffic_is_on.clear()
        while time.monotonic() < until and not self.batches.is_midway and not self.over.is_set():
            await asyncio.sleep(0.1)
        self._traffic_is_on.set()

    async def _tidy(self) -> None:
        """Delete what those have made who were cut before they could."""
        for name in (*KEYS, *ATTACKERS):
            await tidy(self.site.clients[name])

    # ------------------------------------------------------------------------- the end

    def _told(self, seconds: float, after: Json) -> Json:
        seen = self.supervision
        every = -(-len(seen.looks) // MOST_LOOKS)
        kv_bytes = parse_memory(self.setting.kv_memory)
        return {
            "minutes": round(seconds / 60, 2),
            "requests": self.tally.requests,
            "outcomes": dict(sum(self.tally.counts.values(), Counter())),
            "dead_engines": max(len(seen.deaths), seen.unexplained),
            "restarts": self.restarts.told() if self.restarts is not None else None,
            "batches": judge(self.batches.all, self._answered),
            "latency": self.probes.told(),
            "memory": growth(seen.looks, kv_bytes, 60 * self.setting.judge_after),
            "short_seconds": distribution(self.tally.short_seconds),
            "after": after,
            "unwell": dict(seen.unwell),
            "counts": {name: dict(self.tally.counts[name]) for name in sorted(self.tally.counts)},
            "shown": self.tally.shown,
            "deaths": seen.deaths,
            "looks": seen.looks[::every],
        }


def _drawn(rng: random.Random, actions: Any) -> Action:
    action: Action = rng.choices(list(actions), list(actions.values()))[0]
    return action


@dataclass
class Supervision:
    """Looks at a server from time to time.

    Attributes:
        engines: process ids that the engine has had.
        deaths: what went on when one was gone that nobody had ended.
        unexplained: restarts of the engine that the server counts, less those that are wanted.
        looks: at memory and at what runs.
        unwell: statuses of /health that were not 200.
    """

    site: Site
    tally: Tally
    restarts: Restarts | None
    began: float
    engines: list[int] = field(default_factory=list)
    deaths: list[Json] = field(default_factory=list)
    unexplained: int = 0
    looks: list[Json] = field(default_factory=list)
    unwell: Counter[str] = field(default_factory=Counter)

    async def watch(self, over: asyncio.Event) -> None:
        while not over.is_set():
            try:
                await asyncio.wait_for(over.wait(), LOOK_SECONDS)
            except TimeoutError:
                if not await self.look():
                    over.set()

    async def look(self) -> bool:
        """Note how the server is; whether it is there at all."""
        began = time.monotonic()
        try:
            health = await self.site.operator.get("/health")
            now = await state(self.site.operator)
        except (httpx2.HTTPError, OSError) as error:
            if not self.site.outages.excuses("error", began):
                self.unwell[type(error).__name__] += 1
            if self.restarts is not None:
                return self.restarts.server.is_alive or self.site.outages.is_on
            return not self.engines or parent(self.engines[-1]) is not None
        if health.status_code != 200 and not self.site.outages.excuses("engine down", began):
            self.unwell[health.text[:80]] += 1
        if not self.site.outages.is_on and now["engine"]["pid"] is not None:
            self._note_engine(now["engine"])
            self._note_look(now)
        return True

    def _note_engine(self, engine: Json) -> None:
        wanted = self.restarts.kills_of_this_server if self.restarts is not None else 0
        self.unexplained = max(self.unexplained, engine["restarts"] - wanted)
        if engine["pid"] in self.engines:
            return
        ended = self.restarts.ended if self.restarts is not None else set()
        if self.engines and self.engines[-1] not in ended:
            told = {"at": time.monotonic() - self.began, "error": engine["error"]}
            self.deaths.append({**told, "before": list(self.tally.recent)})
        self.engines.append(engine["pid"])

    def _note_look(self, now: Json) -> None:
        kv = now["kv"]
        self.looks.append(
            {
                "at": round(time.monotonic() - self.began, 1),
                **memory_of(self.engines[-1]),
                "kv_taken": round(1 - kv["free_tokens"] / max(kv["total_tokens"], 1), 4),
                "grammar_bytes": now["grammar_bytes"],
                "running": now["queue"]["running"],
                "waiting": now["queue"]["waiting"],
                "num_preempted": now["totals"]["num_preempted"],
                "restarts": now["engine"]["restarts"],
                "requests": self.tally.requests,
            }
        )

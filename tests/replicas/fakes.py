"""Replicas that answer by arithmetic, in a time of their own: no Ray, no engine, no clock."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from onestem.cost import ModelShape
from onestem.engine.outputs import EngineStats
from onestem.forecasts import Target
from onestem.options import EngineOptions
from onestem.replicas.worker import Facts, Failure, Report
from onestem.request import Request, RequestOutput
from tests.batch.fakes import answer

TARGET = Target(ModelShape(1, 1, 1, 1, 1, 1, 1, 1), 1000, lambda: None, 16, 64)
OPTIONS = EngineOptions(dtype="float32", max_model_len=400, device="cpu")


@dataclass
class FakeReplica:
    """One life of a replica.

    Attributes:
        speed: answers in a call. room: requests that it computes at once.
        waits, has: requests that it has not begun, and has.
    """

    speed: int
    room: int
    calls: deque[tuple[int, list[Request]]] = field(default_factory=deque)
    waits: deque[Request] = field(default_factory=deque)
    has: list[Request] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)


class FakeCrew:
    """Calls are answered in an order that is drawn.

    Args:
        speeds: answers that each replica finishes in a call.
        dies: asked before each answer with (replica, requests that it has begun): whether it is
            killed there and then.
        starts: asked whenever one is to start: what it says of itself.
        answers: gives a request's answer.

    Attributes:
        handed: how often each request was handed out; answered: how often it was answered.
        most_waiting: the most requests that one had and had not begun.
    """

    def __init__(
        self,
        speeds: list[int],
        *,
        seed: int = 0,
        room: int = 4,
        dies: Callable[[int, list[Request]], bool] = lambda replica, has: False,
        starts: Callable[[int], Facts | Failure] | None = None,
        answers: Callable[[Request], RequestOutput] = answer,
    ) -> None:
        self.random = random.Random(seed)
        self.speeds, self.room, self.dies, self.answers = speeds, room, dies, answers
        self.starts = starts or (lambda replica: Facts(f"node {replica}", replica, OPTIONS, TARGET))
        self.alive: dict[int, FakeReplica] = {}
        self.starting: list[int] = []
        self.handed: dict[str, list[int]] = {}
        self.answered: dict[str, int] = {}
        self.num_deaths = self.num_starts = 0
        self.most_waiting = 0

    def start(self, replica: int) -> None:
        self.num_starts += 1
        self.starting.append(replica)

    def call(self, replica: int, run: int, requests: list[Request], seconds: float) -> None:
        for request in requests:
            self.handed.setdefault(request.request_id, []).append(replica)
        self.alive[replica].calls.append((run, requests))
        assert len(self.alive[replica].calls) <= 2

    def stop(self, replica: int) -> None:
        self.alive.pop(replica, None)

    def wait(self) -> list[tuple[int, Any]]:
        busy = [replica for replica, one in self.alive.items() if one.calls]
        assert busy or self.starting, "everybody waits for nobody"
        if self.starting and (not busy or self.random.random() < 0.3):
            replica = self.starting.pop(0)
            said = self.starts(replica)
            if isinstance(said, Facts):
                self.alive[replica] = FakeReplica(self.speeds[replica], self.room)
            return [(replica, said)]
        replica = self.random.choice(sorted(busy))
        return [(replica, self._work(replica, self.alive[replica]))]

    def _work(self, replica: int, one: FakeReplica) -> Report | Failure:
        run, requests = one.calls.popleft()
        one.waits += requests
        outputs = []
        for _ in range(one.speed):
            while one.waits and len(one.has) < self.room:
                one.has.append(one.waits.popleft())
            self.most_waiting = max(self.most_waiting, len(one.waits))
            if not one.has:
                break
            if self.dies(replica, one.has):
                self.num_deaths += 1
                del self.alive[replica]
                return Failure("it was killed")
            request = one.has.pop(self.random.randrange(len(one.has)))
            outputs.append(self.answers(request))
            one.stats.processed_prompt_tokens += len(request.prompt_token_ids)
            one.stats.output_tokens += outputs[-1].metrics.num_output_tokens
            name = request.request_id
            self.answered[name] = self.answered.get(name, 0) + 1
        return Report(run, outputs, len(one.waits), len(outputs) / one.speed, copy(one.stats))

"""An open loop: requests leave when the schedule says, whether earlier ones have ended or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import httpx2
import numpy as np

from onestem_lab.load.client import Target
from onestem_lab.load.figures import Outcome
from onestem_lab.load.workload import Ask

__all__ = ["Hopeless", "drive"]

# Seconds between a run's checks whether it can still hold.
LOOK = 0.5


class Hopeless:
    """Says whether a run has certainly missed its limit, so that the rest need not be waited for.

    Certain: more than a tenth of all its requests have failed, or have taken longer than `limit`
    seconds per token that they asked for, ended or not.
    """

    most = 0.1

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __call__(self, outcomes: Sequence[Outcome], now: float) -> bool:
        return self.count(outcomes, now) > self.most * len(outcomes)

    def count(self, outcomes: Sequence[Outcome], now: float) -> int:
        """Requests that have certainly missed the limit."""
        return sum(self._missed(outcome, now) for outcome in outcomes)

    def _missed(self, outcome: Outcome, now: float) -> bool:
        if outcome.failure or outcome.faults:
            return True
        return (outcome.ended or now) - outcome.arrival > self.limit * outcome.asked_tokens


async def drive(
    client: httpx2.AsyncClient,
    target: Target,
    asks: Sequence[Ask],
    arrivals: np.ndarray,
    give_up: Callable[[Sequence[Outcome], float], bool] | None = None,
) -> list[Outcome]:
    """Send every request at its time (seconds from now) and wait for all answers.

    With `give_up`, a run that it calls hopeless is cut off: requests that have not ended or were
    not sent are failures ("given up").
    """
    began = asyncio.get_running_loop().time()
    outcomes = [
        Outcome(ask.index, ask.app, float(at), ask.output_tokens)
        for ask, at in zip(asks, arrivals, strict=True)
    ]
    sender = asyncio.create_task(_send_all(client, target, asks, outcomes, began))
    try:
        await _watch(sender, outcomes, began, give_up)
    finally:
        await _cancel(sender)
    for outcome in outcomes:
        if not outcome.ended:
            outcome.failure = "given up"
            outcome.ended = asyncio.get_running_loop().time() - began
    return outcomes


async def _send_all(
    client: httpx2.AsyncClient,
    target: Target,
    asks: Sequence[Ask],
    outcomes: Sequence[Outcome],
    began: float,
) -> None:
    clock = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as group:
        for ask, outcome in zip(asks, outcomes):
            await asyncio.sleep(max(0.0, began + outcome.arrival - clock()))
            group.create_task(target.send(client, ask, outcome, began))


async def _watch(
    sender: asyncio.Task[None],
    outcomes: Sequence[Outcome],
    began: float,
    give_up: Callable[[Sequence[Outcome], float], bool] | None,
) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        await asyncio.wait([sender], timeout=None if give_up is None else LOOK)
        if sender.done():
            return await sender
        if give_up is not None and give_up(outcomes, clock() - began):
            return None


async def _cancel(task: asyncio.Task[None]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait([task])

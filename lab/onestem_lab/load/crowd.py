"""Client processes that deal a run's requests out among themselves.

One process reads some 7,000 chunks a second; a server on a GPU sends more.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from onestem_lab.load.drive import Hopeless
from onestem_lab.load.figures import Outcome

__all__ = ["ALONE", "Crowd", "Part", "default_clients", "hopeless", "wait_for_all"]

CORES_PER_CLIENT = 4
START_SECONDS = 120.0


def default_clients() -> int:
    """A fourth of the cores: the others are the server's."""
    return max(1, len(os.sched_getaffinity(0)) // CORES_PER_CLIENT)


@dataclass(frozen=True)
class Part:
    """A client's requests of a run: number `index`, and each `of`-th after it."""

    index: int = 0
    of: int = 1


ALONE = Part()
# What the processes of a crowd share; set when each starts.
_shared: dict[str, Any] = {}


def _start(missed: Any, together: Any) -> None:
    _shared.update(missed=missed, together=together)


class _AllHopeless(Hopeless):
    """`Hopeless` over all clients' requests, sent or not."""

    def __init__(self, limit: float, part: Part, total: int) -> None:
        super().__init__(limit)
        self._part, self._total = part, total

    def __call__(self, outcomes: Sequence[Outcome], now: float) -> bool:
        missed = _shared["missed"]
        missed[self._part.index] = self.count(outcomes, now)
        return sum(missed) > self.most * self._total


def hopeless(limit: float, part: Part, total: int) -> Hopeless:
    """The test whether a run of `total` requests is hopeless, of which this client has a part."""
    return Hopeless(limit) if part == ALONE else _AllHopeless(limit, part, total)


def wait_for_all(part: Part) -> None:
    """Return when all clients of the run have called this."""
    if part != ALONE:
        _shared["missed"][part.index] = 0
        _shared["together"].wait(START_SECONDS)


class Crowd:
    """Client processes, which stay for all runs, until `close`."""

    def __init__(self, clients: int) -> None:
        context = multiprocessing.get_context("spawn")
        shared = (context.Array("l", clients, lock=False), context.Barrier(clients))
        self._clients = clients
        self._pool = ProcessPoolExecutor(clients, context, _start, shared)

    def run(self, drive: Callable[[Part], list[Outcome]]) -> list[Outcome]:
        """Run `drive` for each part; the outcomes in the requests' order. `drive` must be of a
        module's top level, with arguments that can be pickled."""
        parts = [Part(index, self._clients) for index in range(self._clients)]
        outcomes = [one for part in self._pool.map(drive, parts) for one in part]
        return sorted(outcomes, key=lambda outcome: outcome.index)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

"""Runs of a workload against a server: at given rates, or to find the rate that holds."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import httpx2

from onestem.bench import named
from onestem.errors import ConfigError
from onestem_lab.load.client import Target, open_client
from onestem_lab.load.crowd import ALONE, Crowd, Part, hopeless, wait_for_all
from onestem_lab.load.drive import drive
from onestem_lab.load.figures import Outcome, summary, within_limit
from onestem_lab.load.search import RateSearch
from onestem_lab.load.workload import Workload

__all__ = ["Bench", "model_name"]

# Minimum of a run by duration: a 90th percentile of fewer says nothing.
FEWEST_REQUESTS = 20


@dataclass(frozen=True)
class Bench:
    """A workload, a server, and the length and limit of a run.

    Attributes:
        limit: seconds per output token that nine of ten requests must stay within.
        requests: requests of a run; None: as many as arrive within `duration` seconds, at least
            20.
        timeout: maximum seconds without a byte of an answer.
        clients: processes that a run's requests are dealt out to; `close` ends them.
        told: whether `step` prints a line for each run.
        runs: numbers of the runs; each run has its own questions.
    """

    base_url: str
    target: Target
    workload: Workload
    limit: float = 0.5
    requests: int | None = None
    duration: float = 60.0
    timeout: float = 600.0
    api_key: str | None = None
    clients: int = 1
    told: bool = True
    runs: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def warm_up(self) -> None:
        """Send a short request of each application, so that the server has its system prompt."""
        asyncio.run(self._warm_up(range(self.workload.apps)))

    def measure(self, rate: float, *, cut: bool = False) -> dict[str, Any]:
        """One run at `rate` requests per second; `cut` ends it once it cannot hold any more."""
        run = next(self.runs)
        outcomes = self._outcomes(rate, cut, run)
        given_up = any(outcome.failure == "given up" for outcome in outcomes)
        return {
            "rate": rate,
            "run": run,
            "held": within_limit(outcomes, self.limit),
            "given_up": given_up,
            **summary(outcomes),
        }

    def close(self) -> None:
        if "_crowd" in self.__dict__:
            self._crowd.close()

    @cached_property
    def _crowd(self) -> Crowd:
        return Crowd(self.clients)

    def _outcomes(self, rate: float, cut: bool, run: int) -> list[Outcome]:
        if self.clients == 1:
            return _part_of(self, rate, cut, run, ALONE)
        return self._crowd.run(partial(_part_of, replace(self, runs=iter(())), rate, cut, run))

    def step(self, search: RateSearch) -> dict[str, Any] | None:
        """The next run of a search for the rate that holds; None when it has ended."""
        rate = search.next_rate()
        if rate is None:
            return None
        run = self.measure(rate, cut=True)
        search.record(rate, run["held"])
        if self.told:
            _tell(run)
        if run["given_up"]:
            # An answer shows that the server is done with what was cut off.
            asyncio.run(self._warm_up(range(1)))
        return run

    def find(self, search: RateSearch) -> list[dict[str, Any]]:
        """All runs of a search, to its end."""
        return list(iter(lambda: self.step(search), None))

    def describe(self) -> dict[str, Any]:
        workload = asdict(self.workload)
        workload["systems"] = len(self.workload.systems)
        workload["question"] = named(self.workload.question)
        workload["answer"] = named(self.workload.answer)
        return {
            **workload,
            "limit": self.limit,
            "requests": self.requests,
            "duration": None if self.requests else self.duration,
            "endpoint": self.target.path,
            "plain": self.target.plain,
            "clients": self.clients,
        }

    async def _warm_up(self, apps: range) -> None:
        run = next(self.runs)
        async with self._client() as client:
            for app in apps:
                ask = self.workload.warm_up(app, run)
                outcome = Outcome(ask.index, app, 0.0, ask.output_tokens)
                await self.target.send(client, ask, outcome, 0.0)
                if not outcome.ok:
                    problem = outcome.failure or "; ".join(outcome.faults)
                    raise ConfigError(f"the warm-up request failed: {problem}")

    async def drive_part(self, rate: float, cut: bool, run: int, part: Part) -> list[Outcome]:
        """Send a client's part of a run, when all clients are ready."""
        within = self.workload.count_within(rate, self.duration)
        count = self.requests or max(FEWEST_REQUESTS, within)
        asks = [self.workload.ask(i, run) for i in range(part.index, count, part.of)]
        arrivals = self.workload.arrivals(rate, count)[part.index :: part.of]
        give_up = hopeless(self.limit, part, count) if cut else None
        async with self._client() as client:
            wait_for_all(part)
            return await drive(client, self.target, asks, arrivals, give_up)

    def _client(self) -> httpx2.AsyncClient:
        return open_client(self.base_url, self.api_key, self.timeout)


def _part_of(bench: Bench, rate: float, cut: bool, run: int, part: Part) -> list[Outcome]:
    return asyncio.run(bench.drive_part(rate, cut, run, part))


def model_name(base_url: str, api_key: str | None = None) -> str:
    """The first model that the server lists."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    url = base_url.rstrip("/").removesuffix("/v1") + "/v1/models"
    try:
        https = url.startswith("https:")
        answer = httpx2.get(url, headers=headers, timeout=30.0, trust_env=False, verify=https)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError) as error:
        raise ConfigError(f"{url} names no model: {error}") from error


def _tell(run: dict[str, Any]) -> None:
    p90 = run["normalised"]["p90"] if run["normalised"] else float("nan")
    verdict = "holds" if run["held"] else "given up" if run["given_up"] else "does not hold"
    print(
        f"{run['rate']:.3f} requests/s: {verdict}; p90 {p90:.3f} s per token, "
        f"{run['output_tokens_per_s']:.0f} tokens/s, {run['failed']} failed, {run['torn']} torn",
        file=sys.stderr,
        flush=True,
    )

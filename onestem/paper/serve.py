"""The request rate that a server sustains (RelayAttention, section 4.3)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from onestem.bench_serve.client import Target
from onestem.bench_serve.run import Bench as Load
from onestem.bench_serve.run import model_name
from onestem.bench_serve.search import RateSearch
from onestem.bench_serve.server import free_port, onestem_command, serving
from onestem.bench_serve.workload import Workload
from onestem.lengths import DATA_SETS, LogNormal
from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.options import ShareMode
from onestem.paper.bench import Bench
from onestem.paper.experiment import Cell, Step

__all__ = ["SustainableRates"]

REQUESTS = 1000
FEWEST_REQUESTS = 8
BURST_RATE = 1e4  # all requests at once
RESOLUTION = 0.05
LONGEST_CHAT = sum(
    lengths.most for lengths in DATA_SETS["sharegpt"].values() if isinstance(lengths, LogNormal)
)


@dataclass(frozen=True)
class SustainableRates:
    """Requests per second at which nine of ten requests stay below `limit` seconds per output
    token, for each length of the system prompt. Arrivals are a Poisson process.

    First all requests come at once. If these stay below the limit, no rate exceeds it, and what the
    server completed per second counts. Else the search begins at that rate.
    """

    model: str
    systems: tuple[int, ...]
    modes: tuple[ShareMode, ...] = ("full", "storage", "off")
    limit: float = 0.5

    def places(self) -> list[dict[str, int]]:
        return [{"system prompt": system} for system in self.systems]

    def steps(self, bench: Bench) -> list[Step]:
        return [partial(self._measure, bench, mode) for mode in self.modes]

    def _measure(self, bench: Bench, mode: ShareMode) -> Iterable[Cell]:
        bench.release()
        systems = bench.thin(self.systems)
        longest = bench.size(max(systems) + LONGEST_CHAT) + 64
        options = bench.engine_options(self.model, longest, share=bench.share(mode))
        vocabulary = ModelConfig.from_directory(find_model(options.model)).vocab_size
        port = free_port()
        with TemporaryDirectory() as state:
            command = onestem_command(port, Path(state), options.flags())
            with serving(command, port) as url:
                for system in systems:
                    tokens = bench.size(system)
                    load = Workload(system_tokens=tokens, scale=bench.scale, vocab_size=vocabulary)
                    rate, run = self._search(bench, url, load)
                    ran = {"system": tokens, "requests": run["requests"]}
                    counts = {name: run[name] for name in ("prompt_tokens", "cached_tokens")}
                    note = "" if rate is not None else "even the lowest rate was too high"
                    if run["rate"] == BURST_RATE:
                        note = "all requests at once stay below the limit: completed per second"
                    yield Cell({"system prompt": system}, mode, rate, ran, counts, note)

    def _search(
        self, bench: Bench, url: str, load: Workload
    ) -> tuple[float | None, dict[str, float]]:
        """(the rate, the last run)."""
        made = Load(
            base_url=url,
            target=Target(model_name(url)),
            workload=load,
            limit=self.limit,
            told=False,
            requests=max(FEWEST_REQUESTS, round(REQUESTS * bench.scale * bench.part)),
        )
        with closing(made):
            made.warm_up()
            burst = made.measure(BURST_RATE)
            start = burst["requests_per_s"]
            if burst["held"] or not start:
                return (start if burst["held"] else None), burst
            search = RateSearch(
                start, resolution=RESOLUTION / bench.scale, least=start / 64, most=64 * start
            )
            runs = list(iter(lambda: made.step(search), None))
        return search.best, runs[-1]

"""The request rate that a server sustains (RelayAttention, section 4.3)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.options import ShareMode
from onestem_lab.lengths import DATA_SETS, LogNormal
from onestem_lab.load.client import Target
from onestem_lab.load.crowd import default_clients
from onestem_lab.load.flags import flags_of
from onestem_lab.load.run import Bench as Load
from onestem_lab.load.run import model_name
from onestem_lab.load.search import RateSearch
from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.load.workload import Workload
from onestem_lab.papers.bench import Bench
from onestem_lab.papers.experiment import Cell, Step

__all__ = ["SECONDS", "SustainableRates"]

SECONDS = 300.0
# A search begins at START_RATE and changes its rate by FACTOR; once another search has ended, where
# that did, and by NEAR.
START_RATE, FACTOR, NEAR = 4.0, 2.0, 1.25
RESOLUTION = 0.05
LONGEST_CHAT = sum(
    lengths.most for lengths in DATA_SETS["sharegpt"].values() if isinstance(lengths, LogNormal)
)


@dataclass(frozen=True)
class SustainableRates:
    """Requests per second at which nine of ten requests stay below `limit` seconds per output
    token, for each length of the system prompt: the highest rate that a search finds.

    Arrivals are a Poisson process. A run is as many requests as arrive in `seconds`. A search goes
    `reach` times above and below the rate with which it begins.
    """

    model: str
    systems: tuple[int, ...]
    modes: tuple[ShareMode, ...] = ("full", "storage", "off")
    limit: float = 0.5
    seconds: float = SECONDS
    reach: float = 64.0

    def places(self) -> list[dict[str, int]]:
        return [{"system prompt": system} for system in self.systems]

    def steps(self, bench: Bench) -> list[Step]:
        found: dict[int, float] = {}  # rate of each system prompt, in the mode before
        return [partial(self._measure, bench, mode, found) for mode in self.modes]

    def _measure(self, bench: Bench, mode: ShareMode, found: dict[int, float]) -> Iterable[Cell]:
        bench.release()
        systems = bench.thin(self.systems)
        longest = bench.size(max(systems) + LONGEST_CHAT) + 64
        options = bench.engine_options(self.model, longest, share=bench.share(mode))
        vocabulary = ModelConfig.from_directory(find_model(options.model)).vocab_size
        port, near = free_port(), None
        with TemporaryDirectory() as state:
            command = onestem_command(port, Path(state), flags_of(options))
            with serving(command, port) as url:
                for system in systems:
                    tokens = bench.size(system)
                    load = Workload(system_tokens=tokens, scale=bench.scale, vocab_size=vocabulary)
                    cell = self._searched(
                        bench, url, load, {"system prompt": system}, mode, found.get(system, near)
                    )
                    if cell.value is not None:
                        near = found[system] = cell.value
                    yield cell

    def _searched(
        self,
        bench: Bench,
        url: str,
        load: Workload,
        at: dict[str, int],
        mode: ShareMode,
        near: float | None,
    ) -> Cell:
        """The cell of a search, which begins near a rate."""
        seconds = self.seconds * bench.scale * bench.part
        start = near or START_RATE / bench.scale
        search = RateSearch(
            start,
            resolution=RESOLUTION,
            factor=FACTOR if near is None else NEAR,
            least=start / self.reach,
            most=start * self.reach,
        )
        made = Load(
            base_url=url,
            target=Target(model_name(url)),
            workload=load,
            limit=self.limit,
            duration=seconds,
            clients=default_clients(),
            told=False,
        )
        with closing(made):
            made.warm_up()
            runs = made.find(search)
        run = next((run for run in runs if run["rate"] == search.best), runs[-1])
        tried = [[run["rate"], run["held"]] for run in runs]
        ran = {
            "system": load.system_tokens,
            "seconds": seconds,
            "requests": run["requests"],
            "tried": tried,
        }
        counts = {name: run[name] for name in ("prompt_tokens", "cached_tokens")}
        if run["normalised"] is not None:
            counts |= {f"normalised_{of}": run["normalised"][of] for of in ("mean", "p90")}
        note = ""
        if search.best is None:
            note = "even the lowest rate was too high"
        elif search.worst is None:
            note = "even the highest rate that was tried holds"
        return Cell(at, mode, search.best, ran, counts, note)

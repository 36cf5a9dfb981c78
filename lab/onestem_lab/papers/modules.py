"""Time to the first token of prompts of modules (Prompt Cache)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from onestem.threads import ram_bytes
from onestem_lab.papers.bench import Bench
from onestem_lab.papers.experiment import Cell, Step
from onestem_lab.pml import FirstTokenCase, measure_first_token

__all__ = ["FirstTokens"]

NEW = 50  # tokens of a prompt's own text
MODULES = 5
REPEAT = 3
SERIES = {"off": "off_", "device": "device_", "host": ""}  # series -> prefix of its figures' names


@dataclass(frozen=True)
class FirstTokens:
    """Milliseconds to the first token: everything computed (`off`), modules in KV memory
    (`device`), modules in host memory (`host`).

    Attributes:
        settings: (place in the table, model, tokens of the modules, tokens of other text).
    """

    settings: tuple[tuple[Mapping[str, Any], str, int, int], ...]

    def places(self) -> list[Mapping[str, Any]]:
        return [at for at, *_ in self.settings]

    def steps(self, bench: Bench) -> list[Step]:
        settings = bench.thin_table(self.settings, itemgetter(0))
        return [partial(self._measure, bench, *setting) for setting in settings]

    def _measure(
        self, bench: Bench, at: Mapping[str, Any], model: str, cached: int, new: int
    ) -> Iterable[Cell]:
        shares = bench.share("full") != "off"
        case = FirstTokenCase(
            cached=bench.size(cached, MODULES),
            new=bench.size(new),
            modules=MODULES,
            tier="host" if shares else "device",
            repeat=bench.size(REPEAT),
        )
        ran = {"cached": case.cached, "new": case.new}
        llm = bench.llm(model, case.cached + case.new + 1, host_kv=ram_bytes() // 2)
        found = measure_first_token(llm, case, None)
        for series, name in SERIES.items():
            if series == "host" and not shares:
                yield Cell(at, series, None, ran, note="share is off: nothing is kept in tiers")
                continue
            counts = {"computed_tokens": found[f"{name}computed_tokens"]}
            yield Cell(at, series, 1000 * found[f"{name}first_token_seconds"], ran, counts)

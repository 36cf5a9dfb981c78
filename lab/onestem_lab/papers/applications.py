"""Prompts of the example applications: times and answers, with and without cached modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from onestem.errors import ConfigError
from onestem.llm import LLM
from onestem.options import EMBEDDED
from onestem.pml import CompiledPrompt
from onestem.request import SamplingParams
from onestem_lab.papers.bench import Bench
from onestem_lab.papers.experiment import Cell, Step
from onestem_lab.results import ROOT

__all__ = ["Applications", "source_tree"]

ANSWER_TOKENS = 100
REPEAT = 5


def source_tree(what: str) -> Path:
    """The folder of the sources, which an installed package lacks.

    Raises:
        ConfigError: there is no `what` in it.
    """
    if not (ROOT / what).exists():
        raise ConfigError(f"{what} is not there: run this in a checkout of the sources")
    return ROOT


@dataclass(frozen=True)
class Applications:
    """Milliseconds to the first token of each prompt: computed whole, and with its modules cached.

    Attributes:
        names: folders in `examples/pml`.
    """

    names: tuple[str, ...]

    def places(self) -> list[dict[str, str]]:
        return [{"application": name} for name in self.names]

    def steps(self, bench: Bench) -> list[Step]:
        return [partial(self._measure, bench, name) for name in self.names]

    def _measure(self, bench: Bench, name: str) -> Iterable[Cell]:
        folder = source_tree("examples/pml") / "examples/pml" / name
        llm = bench.named_llm(EMBEDDED)
        llm.add_schema(folder / "schema.xml")
        for series, isolation in (("off", "off"), ("cached", "anchored")):
            compiled = llm.schemas.compile(folder / "prompt.xml", isolation)
            params = SamplingParams(max_tokens=bench.size(ANSWER_TOKENS), temperature=0)
            whole = isolation == "off"
            _answer(llm, compiled, params, whole)  # encodes the modules, chooses kernels
            runs = range(bench.size(REPEAT, least=2))
            answers = [_answer(llm, compiled, params, whole) for _ in runs]
            seconds, computed, text = zip(*answers, strict=True)
            ran = {"prompt_tokens": len(compiled.ordered_token_ids), "answer": text[0]}
            counts = {"computed_tokens": computed[0]}
            yield Cell({"application": name}, series, 1000 * median(seconds), ran, counts)


def _answer(
    llm: LLM, compiled: CompiledPrompt, params: SamplingParams, whole: bool
) -> tuple[float, int, str]:
    """(seconds to the first token, prompt tokens computed, answer); `whole` empties the cache
    before."""
    if whole:
        llm.engine.cache.clear()
    (output,) = llm.engine.run([llm.pml_request(compiled, params)])
    metrics = output.metrics
    assert metrics.first_token_time is not None
    computed = metrics.num_prompt_tokens - metrics.num_cached_tokens
    return metrics.first_token_time - metrics.arrival_time, computed, output.outputs[0].text

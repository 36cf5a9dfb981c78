"""Accuracy of the embedded model on its invented documents, with modules and without."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from onestem.errors import ConfigError
from onestem.options import EMBEDDED
from onestem.pml import ISOLATIONS
from onestem_lab.papers.applications import source_tree
from onestem_lab.papers.bench import Bench
from onestem_lab.papers.experiment import Cell, Step

__all__ = ["Accuracy"]

LIBRARIES, QUESTIONS = 25, 16


@dataclass(frozen=True)
class Accuracy:
    """Per cent of exact matches by the number of modules that a prompt imports.

    Measured for the baseline (`off`) and both ways of encoding modules alone
    (`onestem_lab.pml_accuracy`).
    """

    isolations: tuple[str, ...] = ISOLATIONS

    def places(self) -> list[dict[str, str]]:
        """None of the paper's: it ran other data."""
        return []

    def steps(self, bench: Bench) -> list[Step]:
        return [partial(self._measure, bench, isolation) for isolation in self.isolations]

    def _measure(self, bench: Bench, isolation: str) -> Iterable[Cell]:
        if bench.told_model not in (None, EMBEDDED):
            raise ConfigError(
                f"model is {bench.told_model}: its answers are checked on the embedded model's "
                "documents, leave --model out"
            )
        questions = _questions()
        libraries = [questions.make_library(i) for i in range(bench.size(LIBRARIES))]
        asked = [
            one
            for i, library in enumerate(libraries)
            for one in questions.ask_all(i, library, bench.size(QUESTIONS))
        ]
        llm = bench.named_llm(EMBEDDED)
        found = questions.measure(llm, libraries, asked, isolation)
        ran = {"questions": len(asked)}
        counts = {"cached_tokens": found["cached_tokens"]}
        for modules in range(1, questions.MODULES + 1):
            tally = found[f"{modules} modules"]
            at = {"data": f"invented documents, {modules} a prompt"}
            yield Cell(at, isolation, tally["percent"], ran, counts)


def _questions() -> Any:
    """The benchmark's Python module, which only a checkout of the sources has."""
    source_tree("training/documents.py")
    return import_module("onestem_lab.pml_accuracy")

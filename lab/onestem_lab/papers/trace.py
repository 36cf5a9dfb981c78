"""Rows of each step of a job: whether token batching leaves valleys (BatchLLM, figures 2, 10)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from onestem_lab.cases import longest_of
from onestem_lab.papers.bench import Bench
from onestem_lab.papers.experiment import Cell, Step
from onestem_lab.papers.jobs import Mode, Setting, answered, scaled_job

__all__ = ["StepRows"]

PARTS = 20  # of a job's steps, of which the means are drawn


@dataclass(frozen=True)
class StepRows:
    """Mean rows of a step, for each twentieth of a job's steps.

    A step with less than half of the fullest step's rows counts as a valley.
    """

    setting: Setting
    modes: tuple[Mode, ...]

    def places(self) -> list[dict[str, str]]:
        return [{"valleys": "% of the steps"}]

    def steps(self, bench: Bench) -> list[Step]:
        return [partial(self._measure, bench, mode) for mode in self.modes]

    def _measure(self, bench: Bench, mode: Mode) -> Iterable[Cell]:
        longest = longest_of(scaled_job(self.setting.job, bench))
        with TemporaryDirectory() as folder:
            file = Path(folder) / "trace.jsonl"
            figures = answered(bench, self.setting, mode, longest, trace=str(file))
            bench.release()
            rows = step_rows(file)
        ran = {"requests": figures["requests"], "steps": len(rows)}
        parts = np.array_split(rows, min(PARTS, len(rows)))
        for i, part in enumerate(parts, 1):
            yield Cell({"% of the steps": 100 * i // len(parts)}, mode.name, part.mean(), ran)
        valleys = float((rows < rows.max() / 2).mean())
        yield Cell({"valleys": "% of the steps"}, mode.name, 100 * valleys, ran)


def step_rows(file: Path) -> np.ndarray:
    """float64: rows of each step in a trace."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    parts = ("decodes", "prefix", "distinct")
    return np.array([sum(line[part] for part in parts) for line in lines], float)

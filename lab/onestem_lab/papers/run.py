"""Runs an experiment: its cells, and the facts needed to read them, as one JSON object."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from typing import Any

from onestem.errors import ConfigError
from onestem_lab.attention.measure import device_facts
from onestem_lab.papers.attention import AttentionSweep
from onestem_lab.papers.bench import Bench
from onestem_lab.papers.experiment import Cell, Experiment, Measure, Step, place
from onestem_lab.papers.jobs import JobRuns, PlanSavings
from onestem_lab.papers.memory import TokenMemories
from onestem_lab.results import bare, commit

__all__ = ["READ_WITHOUT_MODEL", "Progress", "run_experiment"]

READ_WITHOUT_MODEL: Mapping[type[Measure], Sequence[str]] = {
    AttentionSweep: ("device", "dtype", "share", "impl"),
    PlanSavings: ("device", "share"),
    TokenMemories: ("device",),
}
"""Measures that run no model, and the engine options that they read."""

Progress = Callable[[Sequence[Step]], Iterable[Step]]
"""Yields the steps one by one, and may show the progress."""


def run_experiment(
    experiment: Experiment, bench: Bench, command: str, progress: Progress = iter
) -> dict[str, Any]:
    """Measure all cells.

    Returns:
        content of the JSON file. `cells` are ours, `published` the paper's: lists of `Cell` as
        objects.

    Raises:
        ConfigError: several devices are to hold a model together, and nothing runs a model.
    """
    ranks = bench.ranks(getattr(experiment.measure, "ranks", 1))
    facts = device_facts(bench.device)
    if ranks > 1:
        if type(experiment.measure) in READ_WITHOUT_MODEL:
            raise ConfigError(f"{experiment.name} runs no model: leave tensor_parallel_size out")
        facts["device"] = f"{ranks} x {facts['device']}"
    if isinstance(experiment.measure, AttentionSweep | JobRuns):
        bench.refused = {}
    else:
        bench.refused = dict.fromkeys(bench.against, "nothing is compared with peers here")
    model = bench.told_model
    if model is not None and type(experiment.measure) in READ_WITHOUT_MODEL:
        bench.refused[f"model {model}"], model = "no model runs here", None
    commit()  # as it begins
    began = time.perf_counter()
    turns: dict[Any, list[Cell]] = {}
    steps = experiment.measure.steps(bench)
    first = steps[:1] if isinstance(experiment.measure, JobRuns) else []
    for job in first:  # a process's first job is slower than the next (lab/notes/papers.md)
        list(job())
    for step in progress(steps * bench.repeat):
        for cell in step():
            turns.setdefault((place(cell.at), cell.series), []).append(cell)
    cells = list(map(Cell.of_turns, turns.values()))
    published = experiment.with_ratios(experiment.published, experiment.published_ratio)
    return {
        "name": experiment.name,
        "source": experiment.source,
        "title": experiment.title,
        "unit": experiment.unit,
        "assumed": experiment.assumed,
        "machine": experiment.machine,
        "command": bare(command),
        "commit": commit(),
        "date": date.today().isoformat(),
        "scale": bench.scale,
        "part": bench.part,
        "repeat": bench.repeat,
        "discarded": len(first),
        "share": bench.share("full"),
        "model": model,
        **facts | {"versions": facts["versions"] | bench.versions},
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "seconds": time.perf_counter() - began,
        "refused": dict(bench.refused),
        "cells": [asdict(cell) for cell in experiment.with_ratios(cells, experiment.ratio)],
        "published": [asdict(cell) for cell in published],
    }

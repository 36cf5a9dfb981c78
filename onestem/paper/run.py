"""Runs an experiment: its cells, and the facts needed to read them, as one JSON object."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import date
from typing import Any

from onestem.ops.bench.measure import device_facts
from onestem.paper.attention import AttentionSweep
from onestem.paper.bench import Bench
from onestem.paper.experiment import Cell, Experiment, Step
from onestem.paper.jobs import JobRuns

__all__ = ["Progress", "run_experiment"]

Progress = Callable[[Sequence[Step]], Iterable[Step]]
"""Yields the steps one by one, and may show the progress."""


def run_experiment(
    experiment: Experiment, bench: Bench, command: str, progress: Progress = iter
) -> dict[str, Any]:
    """Measure all cells.

    Returns:
        content of the JSON file. `cells` are ours, `published` the paper's: lists of `Cell` as
        objects.
    """
    if isinstance(experiment.measure, AttentionSweep | JobRuns):
        bench.refused = {}
    else:
        bench.refused = dict.fromkeys(bench.against, "nothing is compared with peers here")
    began = time.perf_counter()
    cells: list[Cell] = []
    for step in progress(experiment.measure.steps(bench)):
        cells += step()
    published = experiment.with_ratios(experiment.published, experiment.published_ratio)
    return {
        "name": experiment.name,
        "source": experiment.source,
        "title": experiment.title,
        "claim": experiment.claim,
        "unit": experiment.unit,
        "assumed": experiment.assumed,
        "machine": experiment.machine,
        "command": command,
        "date": date.today().isoformat(),
        "scale": bench.scale,
        "part": bench.part,
        "share": bench.share("full"),
        "model": bench.told_model,
        **device_facts(bench.device),
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "seconds": time.perf_counter() - began,
        "refused": dict(bench.refused),
        "cells": [asdict(cell) for cell in experiment.with_ratios(cells, experiment.ratio)],
        "published": [asdict(cell) for cell in published],
    }

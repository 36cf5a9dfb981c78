"""An engine's state in plain values: its runs, what holds KV memory, what runs and waits."""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from onestem.cache import Run

if TYPE_CHECKING:
    from onestem.engine.engine import Engine
    from onestem.engine.sequence import Sequence

__all__ = ["snapshot_of"]

MOST_RUNS = 400
MOST_MODULES = 200
FIRST_TOKENS = 12


def snapshot_of(engine: Engine) -> dict[str, Any]:
    """Plain values, for JSON.

    `runs`: the largest by tokens, each after its parent: id, parent (None at the top), start,
    tokens, computed, readers (running sequences), owner (`prefix`, `interactive`, `job`, `cached`),
    pinned (the prefix's name, or None) and first token ids. `num_runs` counts all. `modules` are
    the runs of PML modules, alike, with `start` their position.
    `pages` by owner: a page that several hold is counted for the first of prefix, interactive, job,
    cached. `holders` have {owner, name, pages}, where the name is the prefix's, or the id of a
    request that reads it.
    """
    scheduler, pool = engine.scheduler, engine.cache.pool
    reading = _reading(engine)
    readers = _readers(reading)
    pinned = engine.requests.pins.runs
    owners = {run: _owner(run, readers, pinned) for run in engine.cache.runs()}
    holders = _pages_by_holder(owners, {**_names(reading), **pinned})
    modules = set(engine.cache.modules)
    tree = {run: owner for run, owner in owners.items() if run not in modules}
    return {
        "pages": {
            "size": pool.page_size,
            "total": pool.num_pages,
            "free": pool.num_free,
            "held": pool.num_held,
            "cached": pool.num_pages - pool.num_free - pool.num_held,
            **_pages_by_owner(holders),
        },
        "holders": [
            {"owner": owner, "name": name, "pages": count}
            for (owner, name), count in holders.items()
        ],
        "running": len(scheduler.interactive.running),
        "running_jobs": len(scheduler.jobs.running),
        "paused_jobs": scheduler.jobs.num_paused,
        "waiting": engine.num_waiting,
        "jobs": engine.requests.job_ids,
        "prefixes": [dataclasses.asdict(info) for info in engine.requests.prefixes()],
        "stats": engine.stats.to_dict(),
        "num_runs": len(tree),
        "runs": [_run(run, readers, owners, pinned) for run in _largest(tree)],
        "num_modules": len(modules),
        "modules": [_run(run, readers, owners, {}) for run in _by_size(modules, MOST_MODULES)],
    }


def _reading(engine: Engine) -> list[tuple[Sequence, list[Run]]]:
    """Running sequences, those of interactive requests first, with the runs that each reads."""
    version = engine.scheduler.version
    running = engine.scheduler.running
    return [(s, [*s.path(version), *{one.run: None for one in s.imports}]) for s in running]


def _readers(reading: list[tuple[Sequence, list[Run]]]) -> dict[Run, list[int]]:
    """By run, how many interactive sequences and how many sequences of jobs read it."""
    readers: dict[Run, list[int]] = {}
    for sequence, runs in reading:
        for run in runs:
            readers.setdefault(run, [0, 0])[sequence.is_job] += 1
    return readers


def _names(reading: list[tuple[Sequence, list[Run]]]) -> dict[Run, str]:
    """By run, the id of a request that reads it; of an interactive one, if there is one."""
    names: dict[Run, str] = {}
    for sequence, runs in reading:
        for run in runs:
            names.setdefault(run, sequence.state.request.request_id)
    return names


def _owner(run: Run, readers: dict[Run, list[int]], pinned: Container[Run]) -> str:
    if run in pinned:
        return "prefix"
    interactive, jobs = readers.get(run, (0, 0))
    return "interactive" if interactive else "job" if jobs else "cached"


def _pages_by_holder(owners: dict[Run, str], names: dict[Run, str]) -> Counter[tuple[str, str]]:
    """(owner, name) -> pages."""
    held = [(run, owner) for run, owner in owners.items() if owner != "cached"]
    pages: dict[int, tuple[str, str]] = {}
    for kind in ("job", "interactive", "prefix"):
        for run, owner in held:
            if owner == kind:
                pages.update(dict.fromkeys(run.pages, (kind, names[run])))
    return Counter(pages.values())


def _pages_by_owner(holders: Mapping[tuple[str, str], int]) -> dict[str, int]:
    counts = dict.fromkeys(("prefix", "interactive", "job"), 0)
    for (owner, _), count in holders.items():
        counts[owner] += count
    return counts


def _largest(owners: dict[Run, str]) -> list[Run]:
    """The largest runs with their ancestors, from the top down."""
    chosen: dict[Run, None] = {}
    for run in _by_size(owners, MOST_RUNS):
        path = [node for node in run.path() if node not in chosen]
        if len(chosen) + len(path) <= MOST_RUNS:
            chosen.update(dict.fromkeys(path))
    return sorted(chosen, key=lambda run: (run.start, run.uid))


def _by_size(runs: Iterable[Run], most: int) -> list[Run]:
    return heapq.nlargest(most, runs, key=lambda run: len(run.tokens))


def _run(
    run: Run,
    readers: dict[Run, list[int]],
    owners: dict[Run, str],
    pinned: Mapping[Run, str],
) -> dict[str, Any]:
    parent = run.parent
    return {
        "id": run.uid,
        "parent": parent.uid if parent is not None and parent.parent is not None else None,
        "start": run.position if parent is None else run.start,
        "tokens": len(run.tokens),
        "computed": run.computed,
        "readers": sum(readers.get(run, (0, 0))),
        "owner": owners.get(run, "cached"),
        "pinned": pinned.get(run),
        "salted": run.label.space != "",
        "first": run.tokens[:FIRST_TOKENS].tolist(),
    }

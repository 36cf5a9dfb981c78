"""An engine's runs and what holds its KV memory, in plain values."""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from onestem.cache import Run

if TYPE_CHECKING:
    from onestem.engine.engine import Engine

MOST_RUNS = 400
FIRST_TOKENS = 12

Holder = tuple[str, str]  # `prefix`, `interactive`, `job` or `cached`, and a name
CACHED: Holder = ("cached", "")  # what nobody holds


def snapshot_of(engine: Engine) -> dict[str, Any]:
    """Plain values, for JSON.

    `runs`: the largest by tokens, each after its parent: id, parent (None at the top), start,
    tokens, computed, readers (running sequences), owner (`prefix`, `interactive`, `job`, `cached`),
    pinned (the prefix's name, or None) and first token ids; none of PML modules. `num_runs` counts
    all.
    `pages` by owner: a page that several hold is counted for the first of prefix, interactive, job,
    cached. `holders` have {owner, name, pages}, where the name is the prefix's, or the id of a
    request that reads it. `grammar_bytes`: compiled grammars that are kept.
    """
    pool = engine.cache.pool
    grammars = engine.requests.grammars
    readers, holder_of = _readers(engine)
    pinned = engine.requests.pins.runs
    holder_of |= {run: ("prefix", name) for run, name in pinned.items()}
    holders = _pages_by_holder(engine.cache.runs(), holder_of)
    by_owner = dict.fromkeys(("prefix", "interactive", "job"), 0)
    for (owner, _), count in holders.items():
        by_owner[owner] += count
    modules = set(engine.cache.modules)
    tree = [run for run in engine.cache.runs() if run not in modules]
    return {
        "pages": {
            "size": pool.page_size,
            "total": pool.num_pages,
            "free": pool.num_free,
            "held": pool.num_held,
            "cached": pool.num_pages - pool.num_free - pool.num_held,
            **by_owner,
        },
        "holders": [
            {"owner": owner, "name": name, "pages": count}
            for (owner, name), count in holders.items()
        ],
        "prefixes": [dataclasses.asdict(info) for info in engine.requests.prefixes()],
        "grammar_bytes": 0 if grammars is None else grammars.kept.num_bytes,
        "num_runs": len(tree),
        "runs": [
            {
                **_described(run),
                "readers": readers[run],
                "owner": holder_of.get(run, CACHED)[0],
                "pinned": pinned.get(run),
            }
            for run in _largest(tree)
        ],
    }


def _readers(engine: Engine) -> tuple[Counter[Run], dict[Run, Holder]]:
    """By run, how many running sequences read it, and one of them: an interactive request's, if
    there is one."""
    readers: Counter[Run] = Counter()
    holders: dict[Run, Holder] = {}
    for sequence in engine.scheduler.running:  # interactive requests first
        holder = ("job" if sequence.is_job else "interactive", sequence.state.request.request_id)
        imported = {one.run: None for one in sequence.imports}
        for run in (*sequence.path(engine.scheduler.version), *imported):
            readers[run] += 1
            holders.setdefault(run, holder)
    return readers, holders


def _pages_by_holder(runs: Iterable[Run], holder_of: Mapping[Run, Holder]) -> Counter[Holder]:
    """Pages of all runs that are held."""
    held = [(run, holder_of[run]) for run in runs if run in holder_of]
    pages: dict[int, Holder] = {}
    for kind in ("job", "interactive", "prefix"):
        for run, holder in held:
            if holder[0] == kind:
                pages.update(dict.fromkeys(run.pages, holder))
    return Counter(pages.values())


def _largest(runs: Iterable[Run]) -> list[Run]:
    """The largest runs with their ancestors, from the top down."""
    chosen: dict[Run, None] = {}
    for run in heapq.nlargest(MOST_RUNS, runs, key=lambda run: len(run.tokens)):
        path = [node for node in run.path() if node not in chosen]
        if len(chosen) + len(path) <= MOST_RUNS:
            chosen.update(dict.fromkeys(path))
    return sorted(chosen, key=lambda run: (run.start, run.uid))


def _described(run: Run) -> dict[str, Any]:
    parent = run.parent
    return {
        "id": run.uid,
        "parent": parent.uid if parent is not None and parent.parent is not None else None,
        "start": run.position if parent is None else run.start,
        "tokens": len(run.tokens),
        "computed": run.computed,
        "salted": run.label.space != "",
        "first": run.tokens[:FIRST_TOKENS].tolist(),
    }

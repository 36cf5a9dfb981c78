"""Memory of the server's processes over time, and whether it stays."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["family", "growth", "is_alive", "is_flat", "memory_of", "parent"]

Json = dict[str, Any]

# The median of a life's last quarter may be that much above the second quarter's: the larger.
MOST_GROWTH, MOST_GROWN_BYTES = 0.05, 32 << 20
# Compilers come and go with the grammars that need them.
MOST_GROWN_CHILDREN = 256 << 20
PROCESSES = ("server", "engine", "children")


# ----------------------------------------------------------------------------- processes


def parent(pid: int) -> int | None:
    """The process that started another; None if that is gone."""
    try:
        return int(_stat(pid)[1])
    except OSError:
        return None


def is_alive(pid: int) -> bool:
    """Whether it is there, and not only its exit code."""
    try:
        return _stat(pid)[0] not in ("Z", "X")
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """State, parent and more of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def family(pid: int) -> list[int]:
    """All that a process has started, and what these have, and so on."""
    children: dict[int | None, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            children.setdefault(parent(int(entry.name)), []).append(int(entry.name))
    found: list[int] = []
    last = [pid]
    while last:
        last = [child for one in last for child in children.get(one, [])]
        found += last
    return found


def _rss(pid: int | None) -> int:
    """Bytes of memory that a process has; 0 for one that is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def memory_of(engine: int) -> Json:
    """Process ids and bytes of the server, its engine, and what both have started beside."""
    server = parent(engine)
    others = [pid for pid in family(server) if pid != engine] if server is not None else []
    return {
        "server_pid": server,
        "engine_pid": engine,
        "server_rss": _rss(server),
        "engine_rss": _rss(engine),
        "children": len(others),
        "children_rss": sum(map(_rss, others)),
    }


# ----------------------------------------------------------------------------- growth


def growth(looks: Sequence[Mapping[str, Any]], kv_bytes: int, least_seconds: float) -> Json:
    """How each process has grown in its longest life, between two ends of it.

    What an engine has grown by is `explained` as far as what has a bound of its own has grown,
    each at its most so far: KV memory, whose pages come as they are touched for the first time,
    and compiled grammars, whose memory stays in the heap when they are forgotten.

    Args:
        looks: each with `at` (seconds), what `memory_of` says, `kv_taken` (0 to 1) and
            `grammar_bytes`.
        kv_bytes: of all pages.
        least_seconds: a shorter life is not judged: until all code has run once, a process grows.

    Returns:
        For each of `PROCESSES`: `seconds` of the life, medians of its `quarters`, the `peak`, all
        in bytes, `growth` from the second quarter to the last, the bytes of it that are
        `explained`, and `flat` for the rest of it (None: not judged).
    """
    return {name: _growth(name, looks, kv_bytes, least_seconds) for name in PROCESSES}


def _growth(
    name: str, looks: Sequence[Mapping[str, Any]], kv_bytes: int, least_seconds: float
) -> Json:
    life = _longest_life(looks, "server_pid" if name == "server" else "engine_pid")
    bytes_of = [int(look[f"{name}_rss"]) for look in life]
    seconds = life[-1]["at"] - life[0]["at"]
    if len(life) < 4:
        return {"seconds": seconds, "peak": max(bytes_of), "flat": None}
    quarters = _medians(bytes_of)
    grown = quarters[3] - quarters[1]
    explained = 0
    if name == "engine":
        for bounded in ([look["kv_taken"] * kv_bytes for look in life],
                        [look["grammar_bytes"] for look in life]):  # fmt: skip
            most = _medians(list(itertools.accumulate(bounded, max)))
            explained += int(most[3] - most[1])
    least = MOST_GROWN_CHILDREN if name == "children" else MOST_GROWN_BYTES
    flat = grown - explained <= max(quarters[1] * MOST_GROWTH, least)
    return {
        "seconds": round(seconds, 1),
        "quarters": quarters,
        "peak": max(bytes_of),
        "growth": round(grown / quarters[1], 4) if quarters[1] else None,
        "explained": explained,
        "flat": flat if seconds >= least_seconds else None,
    }


def _medians(values: Sequence[float]) -> list[float]:
    """Of each quarter."""
    cuts = [len(values) * quarter // 4 for quarter in range(5)]
    return [statistics.median(values[a:b]) for a, b in itertools.pairwise(cuts)]


def _longest_life(looks: Sequence[Mapping[str, Any]], pid: str) -> list[Mapping[str, Any]]:
    lives = [list(life) for _, life in itertools.groupby(looks, lambda look: look[pid])]
    return max(lives, key=lambda life: life[-1]["at"] - life[0]["at"])


def is_flat(found: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether no process that was judged has grown."""
    return all(one["flat"] is not False for one in found.values())

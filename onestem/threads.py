"""The machine's cores and memory, and how threads wait for each other. Imports no torch.

A layer has some ten parallel regions, each with a barrier at its end. The OpenMP runtime of GCC,
which PyTorch's CPU builds bring along, spins there for a millisecond before a thread sleeps. Where
cores are shared with another program, a thread that spins burns the time in which the other one
could run. With one busy process per core a request then takes nine times as long instead of two. A
short spin loses nothing where cores are free (`lab/onestem_lab/busy.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

SPIN_ROUNDS = 10_000  # some tens of microseconds; the runtime's own default is 300,000
VARIABLE = "GOMP_SPINCOUNT"
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def spin_shortly() -> None:
    """Have OpenMP threads sleep soon. The runtime reads this once, when torch loads it, so it must
    be called before torch is imported. What the user has set stays."""
    is_set = VARIABLE in os.environ or "OMP_WAIT_POLICY" in os.environ
    if not is_set and "torch" not in sys.modules:
        os.environ[VARIABLE] = str(SPIN_ROUNDS)


def ram_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or what its control groups leave of
    it."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = {True: "memory.max", False: "memory.limit_in_bytes"}
    limits = (_words(folder / names[is_new]) for folder, is_new in _groups("memory"))
    return min([machine, *(int(words[0]) for words in limits if words and words[0].isdecimal())])


def resident_bytes(pid: int) -> int | None:
    """Bytes of memory that a process has in use; None where that is not known."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def spinning() -> str:
    """How threads wait, for a person."""
    if policy := os.environ.get("OMP_WAIT_POLICY"):
        return f"OMP_WAIT_POLICY={policy}"
    if rounds := os.environ.get(VARIABLE):
        return f"{VARIABLE}={rounds}"
    return (
        "as long as the OpenMP runtime likes, which is slow on shared cores: import onestem before "
        f"torch, or set {VARIABLE}={SPIN_ROUNDS}"
    )


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and what its control groups (a container's
    limit) leave; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    files = {True: ("cpu.max",), False: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
    granted = [allowed or 1.0]  # cores' worth of time
    for folder, is_new in _groups("cpu"):
        words = [word for name in files[is_new] for word in _words(folder / name)]
        if len(words) == 2 and words[0].isdecimal() and int(words[1]):  # `max` and -1: no limit
            granted.append(int(words[0]) / int(words[1]))  # microseconds in a period of so many
    return max(1, int(min(granted)))


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of control groups that limit this process, and whether they are of the second
    version, in which all controllers have one folder."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from ((folder, True) for folder in _upwards(CGROUPS, path))
        elif controller in controllers.split(","):
            yield from ((folder, False) for folder in _upwards(CGROUPS / controller, path))


def _upwards(root: Path, path: str) -> list[Path]:
    """A group's folder and those above it: each may limit it. In a container the path may be that
    outside, so the root counts in any case."""
    inside = root / path.lstrip("/")
    return [folder for folder in (inside, *inside.parents) if folder.is_relative_to(root)]


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []

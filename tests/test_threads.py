"""How many cores there are for a process, and how its threads wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onestem import LLM, threads
from onestem.errors import ConfigError


def python(code: str, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, env={**kept, **environment}, check=True, capture_output=True, text=True
    )
    return run.stdout.strip()


SPIN = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("imports", "environment", "found"),
    [
        ("import onestem", {}, str(threads.SPIN_ROUNDS)),
        ("import onestem", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("import onestem", {"OMP_WAIT_POLICY": "passive"}, "None"),
        ("import torch, onestem", {}, "None"),
    ],
)
def test_threads_sleep_soon_unless_told_otherwise(imports, environment, found):
    assert python(f"{imports}; {SPIN}", **environment) == found


def test_what_a_person_is_told(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert "import onestem before torch" in threads.spinning()
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert threads.spinning() == "GOMP_SPINCOUNT=5"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert threads.spinning() == "OMP_WAIT_POLICY=active"


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Control groups of a machine with 64 cores: write their files below this folder."""
    monkeypatch.setattr(threads, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(threads, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    (tmp_path / "membership").write_text("0::/a/b\n")
    return tmp_path / "cgroup"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"a/b/cpu.max": "max 100000\n"}, 64),
        ({"a/b/cpu.max": "250000 100000\n"}, 2),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "50000 100000\n"}, 1),  # in a container, whose path is another's
        ({"a/b/cpu.max": "nonsense\n"}, 64),
    ],
)
def test_the_limits_of_control_groups(groups, files, cores):
    for name, text in files.items():
        write(groups / name, text)
    assert threads.usable_cores() == cores


def test_control_groups_of_the_first_version(groups):
    threads.MEMBERSHIP.write_text("4:cpu,cpuacct:/c\n3:memory:/c\n0::/\n")
    write(groups / "cpu" / "c" / "cpu.cfs_quota_us", "300000\n")
    write(groups / "cpu" / "c" / "cpu.cfs_period_us", "100000\n")
    assert threads.usable_cores() == 3
    write(groups / "cpu" / "c" / "cpu.cfs_quota_us", "-1\n")
    assert threads.usable_cores() == 64


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b\n", {}, None),
        ("0::/a/b\n", {"a/b/memory.max": "max\n"}, None),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, 4096),
        ("0::/a/b\n", {"memory.max": "8192\n"}, 8192),  # in a container
        ("0::/a/b\n", {"a/b/memory.max": "999999999999999999\n"}, None),
        ("3:memory:/c\n0::/\n", {"memory/c/memory.limit_in_bytes": "4096\n"}, 4096),
        ("3:memory:/c\n", {"memory/c/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_memory_that_control_groups_leave(groups, membership, files, limit):
    threads.MEMBERSHIP.write_text(membership)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name, text in files.items():
        write(groups / name, text)
    assert threads.ram_bytes() == (limit or machine)


def test_without_control_groups_affinity_counts(groups, monkeypatch):
    threads.MEMBERSHIP.unlink()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    assert threads.usable_cores() == 3


THREADS = (
    "from onestem import threads, build; import torch; torch.set_num_threads(64); "
    "threads.usable_cores = build.usable_cores = lambda: 3; build.set_threads({}); "
    "print(torch.get_num_threads())"
)


@pytest.mark.parametrize(
    ("asked", "environment", "found"),
    [("None", {}, "3"), ("5", {}, "5"), ("None", {"OMP_NUM_THREADS": "64"}, "64")],
)
def test_the_number_of_threads(asked, environment, found):
    assert python(THREADS.format(asked), **environment) == found


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2"])
def test_bad_numbers_of_threads(bad):
    with pytest.raises(ConfigError, match="threads is"):
        LLM(threads=bad)

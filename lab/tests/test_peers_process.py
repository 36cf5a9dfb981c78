"""A peer's process: loaded once, a result for each run, a reason where there is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from onestem_lab.peers.process import RunnerProcess
from onestem_lab.peers.runners.job import Group, Job

RUNNERS = Path(__file__).parents[1] / "onestem_lab" / "peers" / "runners"
ENGINE = """
import subprocess
from job import main

class Counts:
    answered, forgotten = 0, 0
    def answer(self, job):
        self.answered += 1
        if self.answered == job.settings["breaks_at"]:
            raise ValueError("two\\nlines")
        if self.answered == job.settings["hangs_at"]:
            subprocess.run(["cat"])  # holds stdout, too
        return [[1] * job.output_tokens for _ in job.prompts]
    def forget(self):
        self.forgotten += 1
    def facts(self):
        return {"answered": self.answered, "forgotten": self.forgotten}

main("counts", lambda job: Counts(), ("pytest",))
"""


@pytest.fixture
def start(tmp_path: Path):
    processes = []

    def start(breaks_at: int = 0, hangs_at: int = 0) -> RunnerProcess:
        job = Job(
            model="m", dtype="float32", vocab_size=8, prompts=[[1, 2], [1, 3]],
            groups=[Group(1, (0, 1))], output_tokens=2, kv_tokens=64, kv_bytes=64, threads=1,
            settings={"breaks_at": breaks_at, "hangs_at": hangs_at},
            outputs=str(tmp_path / "outputs.json"),
        )  # fmt: skip
        job.write(tmp_path / "job.json")
        (tmp_path / "engine.py").write_text(ENGINE)
        processes.append(
            RunnerProcess(
                [sys.executable, str(tmp_path / "engine.py"), str(tmp_path / "job.json")],
                cwd=tmp_path,
                environment={**os.environ, "PYTHONPATH": str(RUNNERS)},
                log=tmp_path / "log",
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def test_an_engine_is_loaded_once_and_forgets_before_each_run(start) -> None:
    process = start()
    process.load(60)
    first, second = process.run(60), process.run(60)
    assert (first["answered"], first["forgotten"]) == (2, 1)  # the warm-up was the first
    assert (second["answered"], second["forgotten"]) == (3, 2)
    assert first["load_seconds"] == second["load_seconds"]


def test_what_an_engine_raises_is_the_runs_error(start) -> None:
    process = start(breaks_at=3)
    assert "error" not in process.run(60)
    assert process.run(60)["error"] == "ValueError: two lines"
    assert process.run(60)["error"].startswith("exit code 1")


def test_an_engine_that_does_not_load_says_so_in_its_run(start) -> None:
    process = start(breaks_at=1)
    process.load(60)
    assert process.run(60)["error"].startswith("exit code 1: ValueError: two")


def test_a_run_that_takes_too_long_is_stopped(start) -> None:
    process = start(hangs_at=3)
    assert "error" not in process.run(60)
    assert process.run(0.2) == {"error": "not done after 0.2 s"}
    assert process.process.wait() != 0

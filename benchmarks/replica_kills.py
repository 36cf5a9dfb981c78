"""A job whose replicas and drivers are killed again and again: its file is that of one engine.

    python -m benchmarks.replica_kills [--kills 200] [--replicas 2] [--out FILE]

SIGKILL for a replica, for all of them at once (as with their machine), or for the driver, which the
same command follows. The embedded model in float32 on a CPU, greedy answers; needs Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from onestem import LLM, EngineOptions
from onestem.batch import Progress
from onestem.jobs import run_file
from onestem.replicas import Replicas

OPTIONS = EngineOptions(dtype="float32", kv_memory="2MiB", device="cpu", threads=1)
LINES_PER_KILL = 4
WHOM = ("replica",) * 6 + ("all replicas", "driver")


def write_job(path: Path, lines: int) -> None:
    """Questions about documents, 8 to each."""
    with path.open("w") as file:
        for i in range(lines):
            document = f"Document {i // 8} says what documents of its kind say. " * 3
            body = {"prompt": f"{document}Question {i}", "max_tokens": 8 + i % 9, "temperature": 0}
            line = {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


class Killer:
    """Kills while a job runs, after every so many answers.

    Args:
        log: gets a line for each kill, before it.
        kills: how many there are to be in all lives of the driver.
    """

    def __init__(self, replicas: Replicas, log: Path, kills: int) -> None:
        self._replicas, self._log, self._kills = replicas, log, kills
        self._done = len(log.read_text().splitlines())
        self._random = random.Random(self._done)
        self._next = self._draw()

    def _draw(self) -> int:
        return self._random.randint(1, 2 * LINES_PER_KILL - 1)

    def __call__(self, progress: Progress) -> None:
        if progress.last is None:
            return
        self._next -= 1
        pids = [one.pid for one in self._replicas.replicas]
        if self._next > 0 or self._done >= self._kills or not pids:
            return
        self._done += 1
        self._next = self._draw()
        whom = self._random.choice(WHOM)
        with self._log.open("a") as log:
            log.write(whom + "\n")
        if whom == "driver":
            os.kill(os.getpid(), signal.SIGKILL)
        for pid in pids if whom == "all replicas" else [self._random.choice(pids)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # killed before, and nobody has noticed yet
                continue


def drive(folder: Path, address: str, num_replicas: int, kills: int) -> None:
    """One life of the driver."""
    with Replicas(num_replicas, OPTIONS, address=address) as replicas:
        killer = Killer(replicas, folder / "kills", kills)
        run_file(replicas, folder / "in.jsonl", folder / "out.jsonl", on_progress=killer)


def measure(folder: Path, num_replicas: int, kills: int) -> dict[str, Any]:
    """Run a job to its end, however often its driver is killed."""
    import ray

    lines = 3 * LINES_PER_KILL * kills
    write_job(folder / "in.jsonl", lines)
    with LLM.from_options(OPTIONS) as llm:
        run_file(llm, folder / "in.jsonl", folder / "whole.jsonl")
    (folder / "kills").touch()
    ray.init("local", num_cpus=2 * num_replicas, include_dashboard=False, log_to_driver=False)
    command = [sys.executable, "-m", "benchmarks.replica_kills", "--drive", str(folder)]
    command += ["--address", ray.get_runtime_context().gcs_address]
    command += ["--kills", str(kills), "--replicas", str(num_replicas)]
    began, lives = time.monotonic(), 0
    while (code := subprocess.run(command, check=False).returncode) != 0:
        lives += 1
        if code not in (-signal.SIGKILL, 2):
            raise SystemExit(f"the driver ended with {code}")
    ray.shutdown()
    out = [json.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]
    same = (folder / "out.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    return {
        "lines": lines,
        "replicas": num_replicas,
        "kills": Counter((folder / "kills").read_text().splitlines()),
        "lives_of_the_driver": lives + 1,
        "errors": sum(line["error"] is not None for line in out),
        "equal_bytes": same,
        "seconds": time.monotonic() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if given.drive is not None:
        drive(given.drive, given.address, given.replicas, given.kills)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), given.replicas, given.kills)
    print(json.dumps(found))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    if not found["equal_bytes"] or found["errors"]:
        raise SystemExit("lines were lost or changed")


if __name__ == "__main__":
    main()

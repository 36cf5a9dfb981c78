"""Jobs whose replicas, nodes and drivers are killed again and again: files are those of one engine.

    python -m onestem_lab.replica_kills [--jobs 8] [--kills 25] [--replicas 3] [--out FILE]

SIGKILL for a replica; for the raylet of a node, with which all that runs on it ends, and another
node joins; or for the driver, which the same command follows. The embedded model without its
tokenizer, which takes longest to load, in float32 on a CPU; greedy answers; needs Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onestem import LLM, EngineOptions
from onestem.batch import Progress
from onestem.jobs import run_file
from onestem.models.find import find_model
from onestem.replicas import Replicas
from onestem_lab.results import write

LINES_PER_KILL = 4
WHOM = ("replica",) * 6 + ("node", "driver")
TOKENIZER = ("tokenizer*", "special_tokens*", "chat_template*")
HANG_SECONDS = 300  # without an answer
# Nodes are missed within seconds, not the half minute that Ray allows them.
SYSTEM = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}


def options(model: Path) -> EngineOptions:
    return EngineOptions(
        str(model), dtype="float32", kv_memory="2MiB", device="cpu", threads=1, max_step_tokens=64
    )


def write_model(folder: Path) -> Path:
    """The embedded one, of token ids alone."""
    ignored = shutil.ignore_patterns(*TOKENIZER)
    return Path(shutil.copytree(find_model("embedded"), folder / "model", ignore=ignored))


def write_job(path: Path, lines: int) -> None:
    """Questions about documents, 8 to each."""
    rng = random.Random(0)
    with path.open("w") as file:
        for i in range(lines):
            if i % 8 == 0:
                document = [rng.randrange(64) for _ in range(60)]
            prompt = [*document, *(rng.randrange(64) for _ in range(8))]
            body = {"prompt": prompt, "max_tokens": 8 + i % 9, "temperature": 0}
            line = {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Killer:
    """Kills while a job runs, after every so many answers.

    Args:
        log: gets a line for each kill, before it.
        kills: how many there are to be in all lives of the driver.
    """

    def __init__(self, replicas: Replicas, log: Path, kills: int) -> None:
        self._replicas, self._log, self._kills = replicas, log, kills
        self._done = len(log.read_text().splitlines())
        self._random = random.Random(f"{log.parent.name} {self._done}")
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
        pid = os.getpid() if whom == "driver" else self._random.choice(pids)
        try:
            os.kill(parent_of(pid) if whom == "node" else pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):  # killed before, and nobody has noticed yet
            return


def drive(folder: Path, address: str, num_replicas: int, kills: int) -> None:
    """One life of the driver."""
    with Replicas(num_replicas, options(folder / "model"), address=address) as replicas:
        killer = Killer(replicas, folder / "kills", kills)
        run_file(replicas, folder / "in.jsonl", folder / "out.jsonl", on_progress=killer)


@contextmanager
def cluster(nodes: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Ray on so many nodes of this machine, and a head: its address, and what adds a node for each
    that died."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": SYSTEM}
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(nodes):
        made.add_node(num_cpus=1)

    def mend() -> None:
        for node in list(made.worker_nodes):
            if node.dead_processes():
                made.remove_node(node, allow_graceful=False)
                made.add_node(num_cpus=1)

    try:
        yield made.gcs_address, mend
    finally:
        made.shutdown()


def watched(command: list[str], journal: Path, mend: Callable[[], None]) -> int | None:
    """Exit code of a driver, beside which nodes are mended; None: it hung, and was ended."""
    process, size, since = subprocess.Popen(command), -1, time.monotonic()
    while True:
        try:
            return process.wait(0.5)
        except subprocess.TimeoutExpired:
            mend()
            now = journal.stat().st_size if journal.exists() else -1
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > HANG_SECONDS:
                process.kill()
                process.wait()
                return None


def measure(
    folder: Path, address: str, mend: Callable[[], None], num_replicas: int, kills: int
) -> dict[str, Any]:
    """Run a job to its end, however often its driver is killed."""
    lines = 3 * LINES_PER_KILL * kills
    folder.mkdir()
    model = write_model(folder)
    write_job(folder / "in.jsonl", lines)
    with LLM.from_options(options(model)) as llm:
        run_file(llm, folder / "in.jsonl", folder / "whole.jsonl")
    (folder / "kills").touch()
    command = [sys.executable, "-m", "onestem_lab.replica_kills", "--drive", str(folder)]
    command += ["--kills", str(kills), "--replicas", str(num_replicas)]
    command += ["--address", address]
    began, lives, hangs = time.monotonic(), 1, 0
    while (code := watched(command, folder / "out.jsonl.partial", mend)) != 0:
        if code not in (None, -signal.SIGKILL, 2):
            raise SystemExit(f"the driver ended with {code}")
        lives += 1
        hangs += code is None
    out = [json.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]
    ids = {line["custom_id"] for line in out}
    return {
        "lines": lines,
        "replicas": num_replicas,
        "kills": Counter((folder / "kills").read_text().splitlines()),
        "lives_of_the_driver": lives,
        "lost": lines - len(ids),
        "doubled": len(out) - len(ids),
        "errors": sum(line["error"] is not None for line in out),
        "hangs": hangs,
        "equal_bytes": (folder / "out.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes(),
        "seconds": round(time.monotonic() - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--kills", type=int, default=25, help="In each job.")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    if given.drive is not None:
        drive(given.drive, given.address, given.replicas, given.kills)
        return
    jobs: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(given.replicas) as (address, mend),
    ):
        for number in range(given.jobs):
            jobs.append(
                measure(Path(folder) / str(number), address, mend, given.replicas, given.kills)
            )
            found = total(jobs)
            print(json.dumps(found), flush=True)
            if given.out is not None:
                write(given.out, found)
    if found["lost"] or found["doubled"] or found["errors"] or found["hangs"]:
        raise SystemExit("lines were lost, doubled or not answered, or a driver hung")
    if not found["equal_bytes"]:
        raise SystemExit("answers were changed")


def total(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all jobs together."""
    added = ("lines", "lives_of_the_driver", "lost", "doubled", "errors", "hangs", "seconds")
    return {
        "jobs": len(jobs),
        "replicas": jobs[0]["replicas"],
        "kills": sum((job["kills"] for job in jobs), Counter()),
        **{name: sum(job[name] for job in jobs) for name in added},
        "equal_bytes": all(job["equal_bytes"] for job in jobs),
    }


if __name__ == "__main__":
    main()

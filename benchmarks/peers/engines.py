"""Runs one engine on a job, in that engine's own environment."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.floors import Rates
from benchmarks.peers.runners.job import Job

__all__ = ["Bench"]

ROOT = Path(__file__).parents[2]
RUNNERS = Path(__file__).parent / "runners"


class Bench:
    """A job that engines take turns with.

    Args:
        answers: file for the first answers, with which others are compared; one that is there
            (of a command that was stopped) is used.
    """

    def __init__(
        self,
        job: Job,
        environments: Path,
        work: Path,
        timeout: float,
        answers: Path | None = None,
    ) -> None:
        self.job, self.environments, self.timeout = job, environments, timeout
        self.work = work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.answers = answers or self.work / "first.outputs.json"
        self.first_answers: list[list[int]] | None = None
        if answers is not None and answers.exists():
            self.first_answers = json.loads(answers.read_text())

    def rates(self) -> Rates:
        """This machine's ceilings, measured now."""
        command = [sys.executable, "-m", "benchmarks.peers.floors", self.job.dtype]
        done = self._process(command)
        return Rates(**json.loads(done.stdout))

    def run(self, engine: str, settings: dict[str, Any], *, keep: bool = False) -> dict[str, Any]:
        """The runner's result; with `error` in place of `seconds` where the engine failed.

        `keep` compares the answers with those of the first engine that was kept.
        """
        outputs = self.work / f"{engine}.outputs.json"
        job = dataclasses.replace(self.job, settings=settings, outputs=str(outputs))
        path = self.work / f"{engine}.job.json"
        job.write(path)
        result = self._result(engine, settings, path)
        figure = f"{result['seconds']:.2f} s" if "seconds" in result else result["error"]
        print(f"{engine} {json.dumps(settings)}: {figure}", file=sys.stderr, flush=True)
        if keep and "seconds" in result:
            result["agreement"] = self._agreement(json.loads(outputs.read_text()))
        return result

    def _result(self, engine: str, settings: dict[str, Any], job: Path) -> dict[str, Any]:
        failed: dict[str, Any] = {"engine": engine, "settings": settings}
        python = self._python(engine)
        if not python.exists():
            return {**failed, "error": f"{python} is not there: run benchmarks/peers/install"}
        try:
            done = self._process([str(python), str(RUNNERS / f"run_{engine}.py"), str(job)])
        except subprocess.TimeoutExpired:
            return {**failed, "error": f"not done after {self.timeout:.0f} s"}
        (self.work / f"{engine}.log").write_text(done.stderr)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"engine"')]
        if lines:
            result: dict[str, Any] = json.loads(lines[-1])
            return result
        return {**failed, "error": f"exit code {done.returncode}: {_reason(done.stderr)}"}

    def _python(self, engine: str) -> Path:
        if engine == "onestem":
            return Path(sys.executable)
        return self.environments.resolve() / engine / "bin" / "python"

    def _process(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "GGML_NO_BACKTRACE": "1",
            "OMP_NUM_THREADS": str(self.job.threads),
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
            "VLLM_CACHE_ROOT": str(self.work / "vllm"),
            "PYTHONPATH": str(ROOT) if command[0] == sys.executable else "",
        }
        return subprocess.run(
            command,
            cwd=self.work if command[0] != sys.executable else ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=self.timeout,
        )

    def _agreement(self, answers: list[list[int]]) -> dict[str, float]:
        """Against the first answers kept: the share of requests that are equal, and of tokens up to
        each request's first that differs."""
        if self.first_answers is None:
            self.first_answers = answers
            self.answers.write_text(json.dumps(answers))
        pairs = list(zip(answers, self.first_answers, strict=True))
        same = [_same_prefix(a, b) for a, b in pairs]
        return {
            "requests": sum(a == b for a, b in pairs) / len(pairs),
            "tokens": sum(same) / sum(len(b) for _, b in pairs),
        }


def _reason(log: str) -> str:
    """The line of a log that says what went wrong, as far as one can tell."""
    lines = log.strip().splitlines() or ["no output"]
    telling = [line for line in lines if re.search("error|assert|fail", line, re.IGNORECASE)]
    return (telling or lines)[-1].strip()[:600]


def _same_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

"""Runs engines on a job, each in its own environment."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from onestem_lab.peers.floors import Rates
from onestem_lab.peers.process import RunnerProcess
from onestem_lab.peers.runners.job import Job
from onestem_lab.results import LAB, ROOT

__all__ = ["Bench"]

RUNNERS = Path(__file__).parent / "runners"
OURS = f"{ROOT}:{LAB}"  # where this version and its laboratory are imported from


class Bench:
    """A job that engines take turns with.

    Args:
        answers: file for the first answers, with which others are compared; one that is there
            (of a command that was stopped) is used.
        stay: engines are loaded (`load`) before the runs that are kept, and stay so: their turns
            follow each other closely. All must fit in memory together. Otherwise each run loads
            them again.
    """

    def __init__(
        self,
        job: Job,
        environments: Path,
        work: Path,
        timeout: float,
        answers: Path | None = None,
        stay: bool = False,
    ) -> None:
        self.job, self.environments, self.timeout = job, environments, timeout
        self.stay = stay
        self.loaded: dict[str, RunnerProcess] = {}
        self.work = work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.answers = answers or self.work / "first.outputs.json"
        self.first_answers: list[list[int]] | None = None
        if answers is not None and answers.exists():
            self.first_answers = json.loads(answers.read_text())

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.loaded):
            self.loaded.pop(name).close()

    def rates(self) -> Rates:
        """This machine's ceilings, measured now."""
        command = [sys.executable, "-m", "onestem_lab.peers.floors", self.job.dtype]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self._environment(OURS),
            check=True,
            capture_output=True,
            text=True,
            timeout=self.timeout,
        )
        return Rates(**json.loads(done.stdout))

    def load(self, chosen: dict[str, dict[str, Any]]) -> None:
        """Where engines stay loaded, load these (engine -> settings) before any runs."""
        if not self.stay:
            return
        for engine, settings in chosen.items():
            if self._python(engine).exists():
                self.loaded[_name(engine, settings)] = self._start(engine, settings)
        for process in self.loaded.values():
            process.load(self.timeout)

    def run(self, engine: str, settings: dict[str, Any], *, keep: bool = False) -> dict[str, Any]:
        """The runner's result; with `error` in place of `seconds` where the engine failed.

        `keep` compares the answers with those of the first engine that was kept.
        """
        result = self._result(engine, settings, stay=self.stay and keep)
        figure = f"{result['seconds']:.2f} s" if "seconds" in result else result["error"]
        print(f"{_name(engine, settings)}: {figure}", file=sys.stderr, flush=True)
        if keep and "seconds" in result:
            answers = json.loads(self._outputs(engine).read_text())
            result["agreement"] = self._agreement(answers)
        return result

    def _result(self, engine: str, settings: dict[str, Any], *, stay: bool) -> dict[str, Any]:
        failed: dict[str, Any] = {"engine": engine, "settings": settings}
        if not self._python(engine).exists():
            reason = f"{self._python(engine)} is not there: run lab/onestem_lab/peers/install"
            return {**failed, "error": reason}
        name = _name(engine, settings)
        process = self.loaded.pop(name, None) or self._start(engine, settings)
        try:
            result = process.run(self.timeout)
        except BaseException:
            process.close()
            raise
        if stay and "seconds" in result:
            self.loaded[name] = process
        else:
            process.close()
        return result if "settings" in result else {**failed, **result}

    def _start(self, engine: str, settings: dict[str, Any]) -> RunnerProcess:
        job = dataclasses.replace(self.job, settings=settings, outputs=str(self._outputs(engine)))
        path = self.work / f"{engine}.job.json"
        job.write(path)
        is_ours = engine == "onestem"
        return RunnerProcess(
            [str(self._python(engine)), str(RUNNERS / f"run_{engine}.py"), str(path)],
            cwd=ROOT if is_ours else self.work,
            environment=self._environment(OURS if is_ours else ""),
            log=self.work / f"{engine}.log",
        )

    def _outputs(self, engine: str) -> Path:
        return self.work / f"{engine}.outputs.json"

    def _python(self, engine: str) -> Path:
        if engine == "onestem":
            return Path(sys.executable)
        return self.environments.resolve() / engine / "bin" / "python"

    def _environment(self, python_path: str) -> dict[str, str]:
        return {
            **os.environ,
            "GGML_NO_BACKTRACE": "1",
            "OMP_NUM_THREADS": str(self.job.threads),
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
            "VLLM_CACHE_ROOT": str(self.work / "vllm"),
            "PYTHONPATH": python_path,
        }

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


def _name(engine: str, settings: dict[str, Any]) -> str:
    return f"{engine} {json.dumps(settings)}"


def _same_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

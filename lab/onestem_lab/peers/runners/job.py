"""A job as every runner reads it, and the JSON line that every runner prints for a run.

A runner is `python RUNNER JOB.json` in its own engine's environment, so this module needs nothing
but the standard library. It loads, says so in a line, then makes a run for each line on stdin, and
leaves when stdin ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import resource
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Group", "Job", "Runner", "main", "reexec_with_preloaded"]

WARM_UP_PREFIX, WARM_UP_OWN, WARM_UP_OUTPUT, WARM_UP_MEMBERS, WARM_UP_GROUPS = 64, 32, 4, 4, 2


@dataclass(frozen=True)
class Group:
    """Prompts that begin with the same `prefix_tokens` tokens; `members` index `Job.prompts`."""

    prefix_tokens: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """What to compute: `output_tokens` greedy tokens for each prompt.

    Attributes:
        model: directory with config.json and model.safetensors.
        dtype: float32 or bfloat16, of weights and KV.
        vocab_size: token ids are below it.
        prompts: token ids, in the order in which the user has them.
        groups: which prompts share their beginning, for engines that must be told.
        kv_tokens: most tokens whose keys and values may be held at a time.
        kv_bytes: what those tokens take.
        threads: of the processor.
        settings: the runner's own; an unknown one is refused.
        outputs: file for the answers, a list of token ids for each prompt.
    """

    model: str
    dtype: str
    vocab_size: int
    prompts: list[list[int]]
    groups: list[Group]
    output_tokens: int
    kv_tokens: int
    kv_bytes: int
    threads: int
    settings: dict[str, Any]
    outputs: str

    @staticmethod
    def read(path: str) -> Job:
        fields = json.loads(Path(path).read_text())
        groups = [Group(g["prefix_tokens"], tuple(g["members"])) for g in fields.pop("groups")]
        return Job(groups=groups, **fields)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @property
    def longest(self) -> int:
        """Tokens of the longest request, answer included."""
        return max(map(len, self.prompts)) + self.output_tokens

    def warm_up(self) -> Job:
        """A small job of the same kind over other tokens: nothing of this one may be cached."""
        prompts: list[list[int]] = []
        groups = []
        for group in self.groups[:WARM_UP_GROUPS]:
            prefix = min(group.prefix_tokens, WARM_UP_PREFIX)
            start = len(prompts)
            for member in group.members[:WARM_UP_MEMBERS]:
                ids = self.prompts[member]
                own = ids[group.prefix_tokens :][:WARM_UP_OWN]
                prompts.append([(t + 1) % self.vocab_size for t in [*ids[:prefix], *own]])
            groups.append(Group(prefix, tuple(range(start, len(prompts)))))
        output = min(self.output_tokens, WARM_UP_OUTPUT)
        return dataclasses.replace(self, prompts=prompts, groups=groups, output_tokens=output)


class Runner(Protocol):
    """An engine that is loaded for a job's model and settings."""

    def answer(self, job: Job) -> list[list[int]]:
        """Output token ids in the prompts' order."""

    def forget(self) -> None:
        """Drop whatever is cached of earlier prompts."""

    def facts(self) -> dict[str, Any]:
        """What the result should tell of the run just made."""


def main(engine: str, load: Callable[[Job], Runner], packages: Sequence[str]) -> None:
    """Run the job named on the command line for each line of stdin; a line of stdout is a result.

    What the engine raises becomes the result's `error`, in one line, and exit code 1.
    """
    job = Job.read(sys.argv[1])
    result: dict[str, Any] = {
        "engine": engine,
        "settings": job.settings,
        "versions": _versions(packages),
    }
    try:
        runner, load_seconds = _loaded(job, load)
        result["load_seconds"] = load_seconds
        print(json.dumps({"loaded": engine}), flush=True)
        for _ in sys.stdin:
            print(json.dumps(result | _measure(job, runner)), flush=True)
            runner.forget()
    except BaseException as error:
        reason = " ".join(str(error).split())[:600]
        print(json.dumps({**result, "error": f"{type(error).__name__}: {reason}"}), flush=True)
        raise


def _loaded(job: Job, load: Callable[[Job], Runner]) -> tuple[Runner, float]:
    """An engine that has answered a small job, with nothing cached; seconds that it took."""
    started = time.perf_counter()
    runner = load(job)
    runner.answer(job.warm_up())
    runner.forget()
    return runner, time.perf_counter() - started


def _measure(job: Job, runner: Runner) -> dict[str, Any]:
    started = time.perf_counter()
    answers = runner.answer(job)
    seconds = time.perf_counter() - started
    _check(job, answers)
    Path(job.outputs).write_text(json.dumps(answers))
    return {
        "seconds": seconds,
        "requests_per_s": len(answers) / seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "tokens_sha256": _hash(answers),
        **runner.facts(),
    }


def _check(job: Job, answers: list[list[int]]) -> None:
    """An engine that stops early would win for nothing."""
    short = [i for i, ids in enumerate(answers) if len(ids) != job.output_tokens]
    if short or len(answers) != len(job.prompts):
        raise RuntimeError(
            f"{len(answers)} answers to {len(job.prompts)} prompts, {len(short)} of them not of "
            f"{job.output_tokens} tokens (the first: {short[:1]})"
        )


def _hash(answers: list[list[int]]) -> str:
    """As in `onestem bench batch`: each answer's length and ids as little-endian int64."""
    digest = hashlib.sha256()
    for ids in answers:
        digest.update(struct.pack(f"<{len(ids) + 1}q", len(ids), *ids))
    return digest.hexdigest()


def _versions(packages: Sequence[str]) -> dict[str, str]:
    return {"python": sys.version.split()[0], **{name: version(name) for name in packages}}


def reexec_with_preloaded(libraries: Sequence[str]) -> None:
    """Start this program again with shared libraries loaded first; once, and only if there are
    any."""
    if not libraries or os.environ.get("RUNNER_PRELOADED"):
        return
    before = os.environ.get("LD_PRELOAD", "")
    os.environ["LD_PRELOAD"] = ":".join([*libraries, *filter(None, [before])])
    os.environ["RUNNER_PRELOADED"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])

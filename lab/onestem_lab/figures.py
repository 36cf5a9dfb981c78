"""All public figures of a kind of machine, measured on the commit that is checked out.

    python -m onestem_lab.figures --machine cpu|h100|h200|2xh100|2xh200|4xh100|4xh200

Each figure is one command and the file below lab/results that it writes, which the README,
lab/notes/papers.md and the comparison pages read. A figure whose file has this commit, or another
with the same package, is done; so a command that was stopped goes on where it was. In one call as
many figures are begun as --seconds allow by their own limits. Afterwards `scripts/docs` writes the
pages.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO

from onestem_lab import gpu_jobs
from onestem_lab.gpu_jobs import Part
from onestem_lab.peers.vllm_process import absent_vllm
from onestem_lab.results import COMMIT, RESULTS, ROOT, UNFINISHED, commit

__all__ = ["FIGURES", "MACHINES", "Figure", "main"]

MACHINES = ("cpu", "h100", "h200", "2xh100", "2xh200", "4xh100", "4xh200")
"""A number of GPUs and their kind, or a machine of two cores without one."""


@dataclass(frozen=True)
class Figure:
    """One result.

    Attributes:
        name: file below lab/results, without its ending; `{kind}` is the GPU's.
        command: arguments of `python -m`. `{out}` is the file, `{folder}` the one that it is in,
            `{peers}` that of the peers' environments (`onestem_lab/peers/install`), `{llama}` a
            llama-server, `{gguf}` SmolLM2's file.
        seconds: it is ended then. At most 8 minutes, but where one run of a peer takes longer.
        gpus: that it runs on; 0: a CPU.
        peer: whether it needs vLLM for GPUs.
    """

    name: str
    command: str
    seconds: int
    gpus: int = 1
    peer: bool = False


def _part(part: Part) -> Figure:
    """A part of `gpu_jobs`. It is ended after twice what it is expected to take, as there."""
    name = FILES.get(part.name, part.name) + "-{kind}"
    arguments = part.arguments.replace("{", "{{").replace("}", "}}")  # settings in JSON
    command = f"onestem_lab.{part.module} {arguments} --out {{out}}"
    return Figure(name, command, min(480, 2 * part.seconds), peer=part.waits)


def _ours(name: str, arguments: str, seconds: int, gpus: int = 1) -> Figure:
    return Figure(name, f"onestem_lab.{arguments} --out {{out}}", seconds, gpus)


def _peers(case: str, more: str = "", suffix: str = "-amx", seconds: int = 480) -> Figure:
    """A case beside vLLM, with the settings that were its best in a sweep."""
    command = (
        f"onestem_lab.peers.run {case} --environments {{peers}} --engines onestem,vllm --threads 2 "
        "--best-from lab/results/sweep-0.1b-4x16-amx.json "
        f"--stay --resume --repeats 5 {more} --suffix={suffix}"
    )
    return Figure(f"peers-{case}{suffix}", command, seconds, gpus=0)


def _paper(name: str, part: float = 1, seconds: int = 240, gpus: int = 1, more: str = "") -> Figure:
    device = "cuda" if gpus else "cpu"
    command = (
        f"onestem bench paper {name} --device {device} --part {part:g} --repeat 3 --quiet {more} "
        "--out {folder}"
    )
    return Figure(f"paper/{name}", command, seconds, gpus)


PAIRS = "groups=24,degree=2,prefix=700,distinct=200,output=40"
JOBS = gpu_jobs.LONG_JOB, gpu_jobs.WIDE_JOB
STREAMS = tuple(f"job {count}x1 0/600/256" for count in (1, 4, 16, 500))
THRICE = "--repeats 3 --peer-repeats 3"
# What pages read, where a part of `gpu_jobs` has another name.
FILES = {"deterministic": "deterministic-vllm", "exam-transformers": "scores-8b"}

PAPERS = (
    # Claims first: jobs in each paper's own setting; then attention alone; then what is counted.
    _paper("batch-table1", 0.15, 480),
    _paper("batch-fig6a", 0.05, 480, more="--against vllm"),
    _paper("relay-fig7", 0.41, 480),
    _paper("hydragen-fig4", 1, 480, gpus=2, more="--tensor-parallel-size 2"),
    _paper("cache-fig5"),
    _paper("relay-table3", 0.1, 480),
    _paper("relay-table4", 0.1, 480),
    _paper("hydragen-fig6"),
    _paper("hydragen-fig7", 0.05),
    _paper("hydragen-table1", 0.02, 480),
    _paper("batch-table2"),
    _paper("batch-table3-rates", 0.1),
    _paper("batch-table4", 0.3),
    _paper("batch-fig2", 0.3),
    _paper("batch-fig6b", 0.03, 480),
    _paper("batch-fig6e", 0.02, 480),
    _paper("batch-fig7", 0.04, 480, more="--kv-memory 8GiB"),
    _paper("cache-fig9"),
    _paper("hydragen-table2", 0.45, more="--against 1"),
    *(_paper(f"hydragen-table{n}", 0.45) for n in (3, 4, 5, 6, 7)),
    *(_paper(name) for name in ("batch-fig11", "relay-fig1", "relay-fig6", "hydragen-fig5")),
    _paper("hydragen-fig8"),
    _paper("relay-fig10", 0.3),
    *(_paper(name, gpus=0) for name in ("batch-fig9", "batch-overhead", "batch-table3")),
    *(_paper(name, gpus=0) for name in ("batch-industry", "cache-table2", "cache-table3")),
    *(_paper(f"cache-fig{n}", gpus=0) for n in (6, 7, 8)),
    _paper(  # which times each first token three times itself
        "cache-fig12", 0.25, 480, gpus=0, more="--model shape:0.5b --kv-memory 3GiB --repeat 1"
    ),
)

FIGURES = (
    # The README's table, and rows where others were ahead once.
    *map(_part, gpu_jobs.PARTS),
    _part(gpu_jobs.beside("dense", "llama3.1-8b", JOBS, 240, THRICE)),
    _part(gpu_jobs.beside("few", "llama3.2-1b", STREAMS, 240, THRICE)),
    _ours("delta", "delta --tokens 8192 --rows 64,256", 240),
    _ours("hybrids-9b-{kind}", "hybrids --device cuda --modes full,storage", 480),
    _ours(
        "deterministic-gpu",
        "deterministic --device cuda --models shape:llama3.1-8b --turns 3 --kv-memory 24GiB",
        480,
    ),
    _ours("attention-trees-{kind}", "attention_trees --device cuda --repeat 5", 480),
    _ours("attention-steps-{kind}", "attention_steps", 300),
    *(
        _ours(f"tiers-8b-{{kind}}-{part}", f"tiers --model shape:llama3.1-8b --parts {part}", 300)
        for part in ("first", "job", "beside", "sessions")
    ),
    _ours(
        "repair-first-llama3.1-8b-cuda",
        "repair --model shape:llama3.1-8b --device cuda --parts first --turns 25 --kv-memory 64GiB",
        240,
    ),
    # Two and four GPUs.
    _ours("tensor-parallel-{kind}", "tensor_parallel --size 2 --repeats 3", 480, gpus=2),
    _ours("tensor-parallel-4-{kind}", "tensor_parallel --size 4 --repeats 3", 480, gpus=4),
    # A CPU.
    *(_peers(f"0.1b-{sizes}") for sizes in ("4x16", "1x64", "64x1")),
    # A run of vLLM took 700 s.
    *(_peers(f"0.1b-{sizes}", seconds=3600) for sizes in ("60x8", "60x8-sorted")),
    *(_peers(f"0.5b-{sizes}") for sizes in ("4x16", "1x64", "64x1")),
    _peers("0.1b-4x16", f"--set {PAIRS}", suffix="-pairs-amx"),
    _ours(
        "served",
        "peers.served {gguf} --llama-server {llama} --work 4x7400/32/64,64x4096/32/16 "
        "--slots 1,4 --dtype bfloat16 --threads 2 --turns 1",
        480,
        gpus=0,
    ),
    _ours(
        "async-cpu",
        "async_streams --model shape:0.1b --device cpu --kv-memory 1GiB --streams 64 "
        "--prompt-tokens 64 --tokens 64 --repeats 5",
        300,
        gpus=0,
    ),
    _ours("deterministic-cpu", "deterministic --threads 2 --models shape:0.1b", 480, gpus=0),
    _ours("attention-trees-cpu", "attention_trees --heads 8/2 --repeat 5", 300, gpus=0),
    _ours("repair-0.5b-cpu", "repair --turns 2 --kv-memory 2GiB", 300, gpus=0),
    _ours("modules-answers", "modules.answers {gguf} --prompts 25 --shares 0.2 0.3 0", 480, gpus=0),
    *PAPERS,
)
"""Those that pages need most come first."""


def main() -> None:
    options = parse()
    folder = options.out.resolve()
    gpus, kind = _described(options.machine)
    chosen = [replace(one, name=one.name.format(kind=kind)) for one in FIGURES if one.gpus == gpus]
    if unknown := set(options.only or ()) - {one.name for one in chosen}:
        known = ", ".join(one.name for one in chosen)
        sys.exit(f"{', '.join(sorted(unknown))}: no figure of {options.machine}; there are {known}")
    if options.only:
        chosen = [one for one in chosen if one.name in options.only]
    there = {"peers": options.peers, "llama": options.llama_server, "gguf": options.gguf}
    ends = time.monotonic() + options.seconds
    told = {"done": 0, "measured": 0, "failed": 0, "not run": 0}
    for figure in chosen:
        outcome = _outcome(figure, folder, there, ends, options.list)
        told[outcome.partition(":")[0]] += 1
        print(f"{figure.name}: {outcome}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in told.items()))
    sys.exit(1 if told["failed"] else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", choices=MACHINES, required=True)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these figures alone")
    parser.add_argument(
        "--seconds", type=float, default=480, help="none is begun that may end later"
    )
    parser.add_argument("--list", action="store_true", help="say what is done, and measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--peers", type=Path, help="environments of the peers on a CPU")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    return parser.parse_args()


def _described(machine: str) -> tuple[int, str]:
    """How many GPUs a machine has, and their kind."""
    if machine == "cpu":
        return 0, machine
    count, several, kind = machine.partition("x")
    return (int(count), kind) if several else (1, machine)


def _outcome(
    figure: Figure, folder: Path, there: dict[str, Path | None], ends: float, only_list: bool
) -> str:
    """What came of a figure: `done` before, `measured` now, `failed: ...` or `not run: ...`."""
    out = folder / f"{figure.name}.json"
    of_cpu = figure.gpus == 0
    if is_done(out, of_cpu=of_cpu):
        return "done"
    if figure.peer and (missing := absent_vllm()):
        return f"not run: {missing}"
    for name, path in there.items():
        if f"{{{name}}}" in figure.command and path is None:
            option = "llama-server" if name == "llama" else name
            return f"not run: it needs --{option}"
    if only_list:
        return f"not run: up to {figure.seconds} s"
    if time.monotonic() + figure.seconds > ends:
        return f"not run: up to {figure.seconds} s are not left of --seconds"
    out.parent.mkdir(parents=True, exist_ok=True)
    words = {name: shlex.quote(str(path)) for name, path in there.items()}
    words |= {"out": shlex.quote(str(out)), "folder": shlex.quote(str(out.parent))}
    log = out.with_suffix(".log")
    with log.open("w") as lines:
        why = _run(shlex.split(figure.command.format(**words)), lines, figure.seconds)
    written = RESULTS / f"{figure.name}.json"  # by commands that have no --out
    if why is None and not is_done(out, of_cpu=of_cpu) and is_done(written, of_cpu=of_cpu):
        shutil.copy(written, out)
    if why is None and not is_done(out, of_cpu=of_cpu):
        why = f"it wrote no result of {commit()}"
    if why is not None:
        return f"failed: {why}; see {log}"
    log.unlink()
    return "measured"


def is_done(out: Path, *, of_cpu: bool = True) -> bool:
    """Whether a result is there that this commit measured, or another with the same package. Its
    parts for a CPU alone make no difference to a GPU's figures."""
    if not out.exists():
        return False
    found = json.loads(out.read_text())
    if not isinstance(found, dict) or found.get(UNFINISHED) or "commit" not in found:
        return False
    return found["commit"] == commit() or _has_this_package(found["commit"], of_cpu=of_cpu)


@cache
def _has_this_package(named: str, *, of_cpu: bool) -> bool:
    """Whether git knows a commit, and nothing of the package differs but its version."""
    parts = ["onestem", "csrc"] if of_cpu else ["onestem", ":!onestem/ops/cpu"]
    diff = ["git", "-C", str(ROOT), "diff", "--quiet", "-I^__version__ = "]
    command = [*diff, named, commit(), "--", *parts]
    return subprocess.run(command, capture_output=True).returncode == 0


def _run(command: Sequence[str], lines: IO[str], seconds: float) -> str | None:
    """Run it with its children, and end all of them in time. Why it failed; None: it did not."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, stdout=lines, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, process_group=0, text=True, env=os.environ | {COMMIT: commit()},
    )  # fmt: skip
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"it took more than {seconds:g} s"
    finally:
        gpu_jobs.end(process)
    return f"exit code {code}" if code else None


if __name__ == "__main__":
    main()

"""A busy machine: the same work alone and beside one busy PyTorch process for each core.

    python -m onestem_lab.busy [--pairs 15] [--shape 0.1b] [--dtype bfloat16] [--against FOLDER]

Two engines take turns, each in a process of its own: `onestem` as it is, whose OpenMP threads soon
sleep at a barrier (`onestem/threads.py`), and `default`, with the OpenMP runtime's own patience; or
`before`, another version in FOLDER (`onestem_lab.checkout`). The busy processes are halted while
the engines have the machine to themselves. Random weights. Written to
lab/results/busy-SHAPE-DTYPE.json; with FOLDER, busy-before-SHAPE-DTYPE.json.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from onestem_lab.checkout import busy_cores, command_of
from onestem_lab.results import LAB, RESULTS, machine, write

# name -> prompts, tokens that they share, tokens of each, tokens to sample
WORK = {
    "one request, 1,449 + 16": (1, 0, 1449, 16),
    "eight, 64 + 30": (8, 0, 64, 30),
    "fifteen that share 1,024, 32 + 16": (15, 1024, 32, 16),
}
PATIENT = {"GOMP_SPINCOUNT": "300000"}
BUSY = "import torch; torch.set_num_threads(1); a = torch.randn(1024, 1024)\nwhile True: a @ a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--shape", default="0.1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--against", type=Path, help="folder of another version")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.shape, options.dtype)
        return
    other = "default" if options.against is None else "before"
    seconds = compare(options, other)
    result = {
        "command": f"python -m onestem_lab.busy --pairs {options.pairs} --shape {options.shape} "
        f"--dtype {options.dtype}" + (" --against FOLDER" if options.against else ""),
        "machine": machine(),
        "seconds": seconds,
        "summary": summary(seconds, other),
    }
    kind = "busy" if options.against is None else "busy-before"
    name = f"{kind}-{options.shape}-{options.dtype}.json"
    write(RESULTS / name, result)
    for row in result["summary"]:
        print(row)


def compare(options: argparse.Namespace, other: str) -> list[dict[str, Any]]:
    """Seconds of each engine's turns, those of a pair one after the other."""
    found = []
    with ExitStack() as stack:
        engines = {
            "onestem": stack.enter_context(start(options, None, {})),
            other: stack.enter_context(
                start(options, options.against, {} if options.against else PATIENT)
            ),
        }
        for process in engines.values():
            stack.callback(process.kill)
        busy = stack.enter_context(busy_cores(BUSY))
        for pair in range(options.pairs):
            for work_name in WORK:
                for beside, signal_number in ((False, signal.SIGSTOP), (True, signal.SIGCONT)):
                    for process in busy:
                        process.send_signal(signal_number)
                    names = list(engines)[:: 1 if pair % 2 else -1]
                    for name in names:
                        seconds = ask(engines[name], work_name)
                        row = {"engine": name, "work": work_name, "busy": beside, "pair": pair}
                        found.append({**row, "seconds": seconds})
    return found


def summary(rows: list[dict[str, Any]], other: str) -> list[dict[str, Any]]:
    """Of each work: medians of its seconds, of `onestem` over `other` in a pair, and of busy over
    alone."""
    found = []
    for name in WORK:
        times = {
            (engine, busy): [
                row["seconds"]
                for row in rows
                if (row["engine"], row["work"], row["busy"]) == (engine, name, busy)
            ]
            for engine in ("onestem", other)
            for busy in (False, True)
        }
        middle = {key: statistics.median(values) for key, values in times.items()}
        against = {
            busy: statistics.median(
                ours / theirs
                for ours, theirs in zip(times["onestem", busy], times[other, busy], strict=True)
            )
            for busy in (False, True)
        }
        found.append(
            {
                "work": name,
                "alone_seconds": middle["onestem", False],
                f"alone_seconds_{other}": middle[other, False],
                f"alone_against_{other}": against[False],
                f"busy_against_{other}": against[True],
                "busy_against_alone": middle["onestem", True] / middle["onestem", False],
                f"busy_against_alone_{other}": middle[other, True] / middle[other, False],
            }
        )
    return found


def start(
    options: argparse.Namespace, folder: Path | None, settings: dict[str, str]
) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    arguments = ["--work", "--shape", options.shape, "--dtype", options.dtype]
    process = subprocess.Popen(
        command_of("onestem_lab.busy", arguments, folder),
        env={**environment, **settings},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=LAB,
    )
    for name in WORK:
        ask(process, name)
    return process


def ask(process: subprocess.Popen[str], work_name: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{work_name}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def work(shape: str, dtype: str) -> None:
    """In a process of its own: do what standard input names, tell the seconds."""
    import time

    import numpy as np

    from onestem import LLM, SamplingParams

    llm = LLM(f"shape:{shape}", device="cpu", dtype=dtype, kv_memory="1GiB")
    draw = np.random.default_rng(0)
    for line in sys.stdin:
        count, shared, own, output = WORK[line.strip()]
        prefix = draw.integers(3, 30000, shared).tolist()
        prompts = [prefix + draw.integers(3, 30000, own).tolist() for _ in range(count)]
        params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()

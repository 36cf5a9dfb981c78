"""The figures of one large GPU, each in a process of its own: a line each, and a JSON file.

    python -m onestem_lab.gpu_jobs --list
    python -m onestem_lab.gpu_jobs [--only NAME,...] [--seconds 600] [--out DIR]
    python -m onestem_lab.gpu_jobs --tiny --out DIR      # the same commands at tiny sizes, on a CPU

Parts run in their order, and none that is expected to take longer than what is left of `--seconds`.
One that fails or takes twice its time is told in a line, its stderr is DIR/NAME.log, and the others
go on. Those beside vLLM (ONESTEM_VLLM_PYTHON names its interpreter) import theirs meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen

from onestem_lab.results import RESULTS

LONG_JOB, WIDE_JOB = "job 40x16 2000/200/100", "job 1x256 8000/64/128"
TINY = {LONG_JOB: "job 2x3 40/10/4", WIDE_JOB: "job 1x4 60/8/4"}
TWICE = "--repeats 2 --peer-repeats 1"
# What vLLM keeps states with: its one cache of prefixes for these ("align"), Triton's kernels for
# prompts where FlashInfer is not there, and graphs up to the largest batch. Linear layers in fp8
# as ours, experts in blocks of 128 as they are published, for which vLLM has tuned sizes.
STATES: dict[str, object] = {
    "additional_config": {"gdn_prefill_backend": "triton"},
    "compilation_config": {
        "cudagraph_capture_sizes": [2**n for n in range(8)] + [*range(192, 641, 64)]
    },
}
STATES_FP8 = STATES | {
    "quantization": "online",
    "quantization_config": {"linear": "fp8_per_channel", "moe": "fp8_per_block"},
}
ONE_STREAM, APART = "job 1x1 0/600/64", "job 256x1 0/512/64"
TINY |= {ONE_STREAM: "job 1x1 0/16/4", APART: "job 4x1 0/8/4"}
TINY |= {f"samples 64x16 {size}": "samples 2x3 16/4" for size in ("256/128", "512/512")}
TINY |= {"exam 10x2000": "exam 2x4"}


@dataclass(frozen=True)
class Part:
    """A module's command.

    Attributes:
        seconds: what it takes on an H200, peers and loading included.
        tiny: further arguments of a trial, which may come again in place of others.
        waits: it takes `--wait`.
    """

    name: str
    module: str
    arguments: str
    seconds: int
    tiny: str
    waits: bool = False

    def command(self, out: Path, *, tiny: bool) -> list[str]:
        arguments = shlex.split(self.arguments)
        if tiny:
            arguments = [TINY.get(word, word) for word in arguments] + shlex.split(self.tiny)
        arguments += ["--wait"] if self.waits else []
        file = str(out / f"{self.name}-{'tiny' if tiny else 'gpu'}.json")
        return [sys.executable, "-m", f"onestem_lab.{self.module}", *arguments, "--out", file]


def beside(name: str, model: str, works: tuple[str, ...], seconds: int, more: str = "") -> Part:
    told = " ".join(f"--work '{work}'" for work in works)
    tiny = "--model shape:0.1b --device cpu --kv-memory 1GiB --repeats 1 --peer-repeats 1"
    tiny += " --peer-questions 2 --peer-settings '{\"enforce_eager\": true}'"
    arguments = f"--model shape:{model} {told} {more}"
    return Part(name, "beside_vllm", arguments, seconds, tiny, waits=True)


PARTS = (
    beside(
        "rollouts",
        "llama3.1-8b",
        ("exam 10x2000", "samples 64x16 512/512"),
        230,
        # Log-probabilities of prompts take memory that vLLM does not count.
        "--repeats 1 --peer-repeats 1 --peer-settings '{\"gpu_memory_utilization\": 0.85}'",
    ),
    beside(
        "deterministic",
        "llama3.1-8b",
        (ONE_STREAM, APART, LONG_JOB, "samples 64x16 256/128", WIDE_JOB),
        300,
        "--deterministic --kv-memory 60GiB --peer-seconds 280",
    ),
    beside("moe", "qwen3-30b-a3b", (LONG_JOB, WIDE_JOB), 190, TWICE),
    beside("windows", "gemma3-12b", (LONG_JOB, WIDE_JOB), 200, TWICE),
    beside("fp8", "llama3.1-8b", (LONG_JOB,), 170, f"--quantization fp8 {TWICE}"),
    beside(
        "hybrid",
        "qwen3.5-9b",
        (WIDE_JOB, LONG_JOB),
        390,
        f"--kv-memory 100GiB --peer-seconds 360 --peer-settings '{json.dumps(STATES)}'",
    ),
    beside(
        "hybrid-moe",
        "qwen3.6-35b-a3b",
        (WIDE_JOB, LONG_JOB),
        540,
        "--quantization fp8 --alone --kv-memory 90GiB --peer-seconds 430 "
        f"--peer-settings '{json.dumps(STATES_FP8)}'",
    ),
    Part(
        "exam-transformers",
        "scores",
        "--model shape:llama3.1-8b --device cuda --kv-memory 40GiB --max-model-len 8192 "
        "--peer transformers --batch-size 8,32 --peer-questions 100",
        70,
        "--model shape:0.1b --device cpu --kv-memory 64MiB --questions 6 --prefix 20 --question 5 "
        "--batch-size 2 --peer-questions 3",
    ),
    Part(
        "monkeys",
        "monkeys",
        "--prompts 16",
        85,
        "--model shape:nothing --device cpu --kv-memory 64MiB --prompts 2 --samples 8 --tokens 6 "
        "--prompt-tokens 40",
    ),
    Part(
        "weights",
        "weights",
        "--model shape:llama3.1-8b --repeats 2",
        85,
        "--model shape:nothing --device cpu --kv-memory 64MiB --repeats 1",
    ),
    Part(
        "streams",
        "async_streams",
        "--model shape:llama3.1-8b --repeats 2",
        110,
        "--model shape:0.1b --device cpu --kv-memory 256MiB --streams 6 --prompt-tokens 8 "
        "--tokens 4 --repeats 1",
    ),
)


def main() -> int:
    options = parse()
    chosen = [part for part in PARTS if options.only is None or part.name in options.only]
    if options.list:
        for part in chosen:
            command = shlex.join(part.command(options.out, tiny=False))
            print(f"{part.name}: {part.seconds} s: {command}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.seconds
    running = {part: start(part, options) for part in chosen if part.waits}
    failed = 0
    for part in chosen:
        left = ends - time.monotonic()
        if part.seconds > left and not options.tiny:
            tell(f"{part.name}: left out, {left:.0f} s are left of its {part.seconds}")
            failed += 1
            continue
        began = time.monotonic()
        process = running.pop(part, None) or start(part, options)
        error = finish(process, min(left, 2.0 * part.seconds))
        reason = "" if error is None else f": failed: {error or last_words(part, options.out)}"
        tell(f"[{part.name}: {time.monotonic() - began:.0f} s]{reason}")
        failed += error is not None
    for process in running.values():
        end(process)
    return 1 if failed else 0


def start(part: Part, options: argparse.Namespace) -> Popen[str]:
    command = part.command(options.out, tiny=options.tiny)
    with log_of(part, options.out).open("w") as log:
        log.write(shlex.join(command) + "\n")
        log.flush()
        return Popen(command, stdin=PIPE, stderr=log, text=True, start_new_session=True)


def finish(process: Popen[str], seconds: float) -> str | None:
    """Have a process do its work; None: it did, else why not, or "" where its log says it."""
    try:
        process.communicate("\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    finally:
        end(process)
    return None if process.returncode == 0 else ""


def end(process: Popen[str]) -> None:
    """Whatever it has started, too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_words(part: Part, out: Path) -> str:
    """The line of a log that says most."""
    lines = log_of(part, out).read_text(errors="replace").strip().splitlines()
    telling = [line for line in lines if re.search("error|exceeds|out of memory", line, re.I)]
    return (telling or lines)[-1].strip()[:300]


def log_of(part: Part, out: Path) -> Path:
    return out / f"{part.name}.log"


def tell(line: str) -> None:
    print(line, flush=True)


def names(text: str) -> list[str]:
    known = [part.name for part in PARTS]
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r}, expected some of {', '.join(known)}")
    return text.split(",")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=names)
    parser.add_argument("--seconds", type=float, default=3600, help="for all of them")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tiny", action="store_true", help="a trial on a CPU")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

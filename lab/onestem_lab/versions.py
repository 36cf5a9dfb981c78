"""Two versions of the package do the same work in turns, both alive on one machine.

    python -m onestem_lab.versions FOLDER [--shape llama3.1-8b] [--turns 3] [--only NAME,...]

FOLDER has the other version (`onestem_lab.checkout`). Each version is one process that keeps its
engine; the turns alternate in which comes first, and each draws new prompts, the same for both.
Only the public call is used, so versions may differ in everything else. Random weights, greedy or
at temperature 1. The ratio of a work is the median over turns of the other version's seconds over
this one's: above 1, this one is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from onestem_lab.checkout import command_of
from onestem_lab.results import LAB, RESULTS, hardware, write

WORKS: dict[str, tuple[int, int, int, int, int, float]] = {
    # groups, prompts of each, shared tokens, own tokens, tokens to sample, temperature
    "40x16 2000/200/100": (40, 16, 2000, 200, 100, 0.0),
    "200x3 2000/200/100": (200, 3, 2000, 200, 100, 0.0),
    "1x256 8000/64/128": (1, 256, 8000, 64, 128, 0.0),
    "rollouts 64x16 512/256": (64, 16, 512, 0, 256, 1.0),
    "1 row 64 + 256": (1, 1, 0, 64, 256, 0.0),
    "256 rows 64 + 128": (256, 1, 0, 64, 128, 0.0),
    "1000 rows 16 + 64": (1000, 1, 0, 16, 64, 0.0),
    "tiny 3x4 100/20/10": (3, 4, 100, 20, 10, 1.0),
}
DEFAULT = ",".join(list(WORKS)[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the other version")
    parser.add_argument("--shape", default="llama3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-memory", default="18GiB", help="of each version")
    parser.add_argument("--turns", type=int, default=3, help="those after a first one")
    parser.add_argument("--only", default=DEFAULT, help=f"some of: {', '.join(WORKS)}")
    parser.add_argument("--out", type=Path, default=RESULTS / "versions.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options)
        return
    result: dict[str, Any] = {
        "command": " ".join(["python -m onestem_lab.versions", *sys.argv[1:]]),
        "machine": hardware(options.device),
        "works": compare(options),
    }
    write(options.out, result)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Of each work: seconds of both versions by turn, and the median ratio."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        sides = {"now": start(options, None), "before": start(options, options.folder)}
        for process in sides.values():
            stack.callback(process.kill)
        for process in sides.values():
            hear(process)
        for name in options.only.split(","):
            seconds: dict[str, list[float]] = {side: [] for side in sides}
            for turn in range(options.turns + 1):
                for side in list(sides)[:: -1 if turn % 2 else 1]:
                    taken = ask(sides[side], name, turn)
                    if turn:
                        seconds[side].append(taken)
            ratios = [b / n for b, n in zip(seconds["before"], seconds["now"], strict=True)]
            found[name] = {"ratio": statistics.median(ratios), "ratios": ratios, **seconds}
            print(f"{name}: {found[name]['ratio']:.3f}", seconds, flush=True)
    return found


def start(options: argparse.Namespace, folder: Path | None) -> subprocess.Popen[str]:
    """A version's process. It says a line once its engine is there."""
    arguments = [str(options.folder), "--child", "--shape", options.shape]
    arguments += ["--device", options.device, "--dtype", options.dtype]
    return subprocess.Popen(
        command_of("onestem_lab.versions", [*arguments, "--kv-memory", options.kv_memory], folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=LAB,
    )


def ask(process: subprocess.Popen[str], name: str, turn: int) -> float:
    assert process.stdin is not None
    process.stdin.write(json.dumps([name, turn]) + "\n")
    process.stdin.flush()
    return float(hear(process))


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a version's process ended: its last words are above")
    return line


def serve(options: argparse.Namespace) -> None:
    """In a version's process: do what standard input names, print the seconds."""
    import numpy as np

    from onestem import LLM, SamplingParams

    told, sys.stdout = sys.stdout, sys.stderr
    llm = LLM(
        f"shape:{options.shape}",
        device=options.device,
        dtype=options.dtype,
        kv_memory=options.kv_memory,
    )
    print("ready", file=told, flush=True)
    for line in sys.stdin:
        name, turn = json.loads(line)
        groups, each, shared, own, tokens, temperature = WORKS[name]
        draw = np.random.default_rng([turn, list(WORKS).index(name)])
        prompts, n, most = [], each if own == 0 else 1, min(30_000, llm.config.vocab_size)
        for _ in range(groups):
            prefix = draw.integers(3, most, shared).tolist()
            prompts += [prefix + draw.integers(3, most, own).tolist() for _ in range(each // n)]
        params = SamplingParams(
            n=n, max_tokens=tokens, temperature=temperature, seed=turn, ignore_eos=True
        )
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(time.perf_counter() - began, file=told, flush=True)


if __name__ == "__main__":
    main()

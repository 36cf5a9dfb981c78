"""Two versions of the package do the same work in turns, both alive on one machine.

    python -m onestem_lab.versions FOLDER ... [--deterministic] [--shape llama3.1-8b] [--turns 3]
        [--only NAME,...]

Each FOLDER has another version (`onestem_lab.checkout`); `--deterministic` adds this one in that
mode. Each is one process that keeps its engine; the turns alternate in which comes first, and each
draws new prompts, the same for all. Only the public call is used, so versions may differ in
everything else. Random weights, greedy or at temperature 1. The ratio of a work is the median over
turns of the other's seconds over this version's: above 1, this one is faster. On a CPU the works
are the cases of `onestem_lab.peers`, some scaled.
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
    "4x16": (4, 16, 1000, 50, 50, 0.0),
    "1x64 half": (1, 64, 2048, 32, 64, 0.0),
    "64x1 half": (64, 1, 0, 256, 32, 0.0),
    "60x8 quarter": (60, 8, 512, 48, 4, 0.0),
}
DEFAULT = ",".join(list(WORKS)[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", help="of other versions")
    parser.add_argument("--deterministic", action="store_true", help="this version so too")
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
    """Of each work: seconds of each version by turn, and the median ratio to this one."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        sides = {"now": start(options)}
        sides |= {folder.name: start(options, folder) for folder in options.folders}
        if options.deterministic:
            sides["deterministic"] = start(options, None, "--deterministic")
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
            found[name] = {side: against(seconds["now"], seconds[side]) for side in sides}
            for side, told in found[name].items():
                print(f"{name}, {side}: {told['ratio']:.3f}", told["ratios"], flush=True)
    return found


def against(now: list[float], seconds: list[float]) -> dict[str, Any]:
    ratios = [other / own for own, other in zip(now, seconds, strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios, "seconds": seconds}


def start(
    options: argparse.Namespace, folder: Path | None = None, *more: str
) -> subprocess.Popen[str]:
    """A version's process. It says a line once its engine is there."""
    arguments = ["--child", "--shape", options.shape, "--device", options.device, *more]
    arguments += ["--dtype", options.dtype, "--kv-memory", options.kv_memory]
    return subprocess.Popen(
        command_of("onestem_lab.versions", arguments, folder),
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
        **({"deterministic": True} if options.deterministic else {}),  # unknown to older versions
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

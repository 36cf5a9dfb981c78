"""Jobs of prompts that share text: the engine's modes against each other, interleaved.

    python -m onestem_lab.batch [CASE ...] [--repeats N] [--dtype bfloat16]

Each case runs `onestem bench batch` once per mode and repeat, in turn, so that a noisy machine
hits all modes alike; medians, spreads and ratios go to lab/results/batch-CASE.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from onestem_lab.results import RESULTS, machine, write

COMMAND = [sys.executable, "-m", "onestem", "bench", "batch"]

# case -> (shape, options, modes with the repeats they get relative to the others)
CASES: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "0.5b-4x16": (
        "0.5b",
        {"groups": 4, "degree": "16", "prefix": "1000", "distinct": 50, "output": 50},
        ("full", "storage", "off"),
    ),
    "0.1b-4x16": (
        "0.1b",
        {"groups": 4, "degree": "16", "prefix": "1000", "distinct": 50, "output": 50},
        ("full", "storage", "off", "no-attention"),
    ),
    "0.1b-1x64": (
        "0.1b",
        {"groups": 1, "degree": "64", "prefix": "4096", "distinct": 64, "output": 128},
        ("full", "storage", "no-attention"),
    ),
    "0.1b-two-levels": (
        "0.1b",
        {"groups": 2, "degree": "16,2", "prefix": "400,101", "distinct": 99, "output": 16},
        ("full", "storage", "off"),
    ),
    "0.1b-unshared": (
        "0.1b",
        {"groups": 16, "degree": "1", "prefix": "0", "distinct": 512, "output": 32},
        ("full", "storage", "off"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--order", default="shuffled")
    parser.add_argument("--modes", help="only these, like full,storage")
    parser.add_argument("--suffix", default="", help="appended to the result file's name")
    options = parser.parse_args()
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"case is {unknown.pop()!r}, expected some of: {', '.join(CASES)}")
    for case in options.cases or CASES:
        modes = tuple(options.modes.split(",")) if options.modes else CASES[case][2]
        result = measure(case, modes, options.repeats, options.dtype, options.order)
        path = RESULTS / f"batch-{case}{options.suffix}.json"
        path.parent.mkdir(exist_ok=True)
        write(path, result)
        show(case, result)


def measure(
    case: str, modes: tuple[str, ...], repeats: int, dtype: str, order: str
) -> dict[str, object]:
    shape, arguments, _ = CASES[case]
    runs: dict[str, list[dict[str, object]]] = {mode: [] for mode in modes}
    command = [*COMMAND, "--model", f"shape:{shape}", "--json"]
    command += ["--dtype", dtype, "--input-order", order, "--device", "cpu"]
    for name, value in arguments.items():
        command += [f"--{name}", str(value)]
    for repeat in range(repeats):
        for mode in modes if repeat % 2 == 0 else modes[::-1]:
            done = subprocess.run(
                [*command, "--share", mode], capture_output=True, text=True, check=True
            )
            runs[mode].append(json.loads(done.stdout))
            print(
                f"{case} {repeat + 1}/{repeats} {mode}: {runs[mode][-1]['seconds']:.1f} s",
                file=sys.stderr,
            )
    return {
        "case": case,
        "command": f"python -m onestem_lab.batch {case} --repeats {repeats} --dtype {dtype} "
        f"--order {order} --modes {','.join(modes)}",
        "shape": shape,
        "machine": machine(),
        "median_seconds": {mode: statistics.median(seconds(runs[mode])) for mode in modes},
        "spread_seconds": {
            mode: [min(seconds(runs[mode])), max(seconds(runs[mode]))] for mode in modes
        },
        "full_against": ratios(runs),
        "runs": runs,
    }


def seconds(runs: list[dict[str, object]]) -> list[float]:
    return [float(run["seconds"]) for run in runs]  # type: ignore[arg-type]


def ratios(runs: dict[str, list[dict[str, object]]]) -> dict[str, dict[str, float]]:
    """How many times the requests per second of each other mode `full` has, pair by pair."""
    out = {}
    for mode in runs:
        if mode == "full":
            continue
        pairs = [b / a for a, b in zip(seconds(runs["full"]), seconds(runs[mode]), strict=True)]
        out[mode] = {"median": statistics.median(pairs), "min": min(pairs), "max": max(pairs)}
    return out


def show(case: str, result: dict[str, object]) -> None:
    print(
        case,
        json.dumps({k: result[k] for k in ("median_seconds", "spread_seconds", "full_against")}),
    )


if __name__ == "__main__":
    main()

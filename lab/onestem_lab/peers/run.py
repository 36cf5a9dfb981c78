"""Onestem against other engines on this CPU: the same jobs, interleaved in one run.

    python -m onestem_lab.peers.run [CASE ...] --environments DIRECTORY [--sweep] [--repeats N]

An engine runs in the environment DIRECTORY/ENGINE (`lab/onestem_lab/peers/install`), Onestem in
this one. Each run is a process of its own, or with `--stay` one run of a process that stays loaded;
loading, compiling and a warm-up are outside its clock.
Results go to lab/results/peers-CASE.json. `--resume` goes on where a stopped command was:
runs that it finished are taken from its log in the work directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from onestem_lab.checkout import busy_cores
from onestem_lab.peers.cases import CASES, Case
from onestem_lab.peers.engines import Bench
from onestem_lab.peers.floors import floor
from onestem_lab.peers.log import RunLog
from onestem_lab.peers.report import show, summary
from onestem_lab.peers.settings import ENGINES, combined, default, sweep
from onestem_lab.peers.weights import model_directory
from onestem_lab.results import RESULTS, ROOT, write

SIZES = ("groups", "degree", "prefix", "distinct", "output")


def main() -> None:
    options = parse()
    # So that a run that is stopped stops its engine.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name in options.cases or CASES:
        case = sized(CASES[name], options)
        result = measure(name, case, options)
        path = RESULTS / f"peers-{name}{options.suffix}.json"
        write(path, result)
        show(result)
    if options.plot is not None:
        from onestem_lab.peers.plot import plot_results  # matplotlib is for developers

        plot_results(options.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--engines", default=",".join(ENGINES), help="of " + ", ".join(ENGINES))
    parser.add_argument("--sweep", action="store_true", help="try each peer's settings first")
    parser.add_argument(
        "--best-from", type=Path, help="take the settings that an earlier result chose"
    )
    parser.add_argument(
        "--settings",
        action="append",
        default=[],
        metavar="ENGINE:JSON",
        help='settings of an engine, like vllm:{"eager":true}',
    )
    parser.add_argument(
        "--stay", action="store_true", help="engines stay loaded together, so that turns are close"
    )
    parser.add_argument("--resume", action="store_true", help="keep the runs of a stopped command")
    parser.add_argument(
        "--last-turn",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="no turn begins later than so long after the first (default: all of --repeats)",
    )
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="so many busy processes beside the runs"
    )
    parser.add_argument("--plot", type=Path, help="draw all results there afterwards")
    add_sizes(parser)
    options = parser.parse_args()
    check_sizes(parser, options)
    for what, given, known in (
        ("case", options.cases, CASES),
        ("engine", options.engines.split(","), ENGINES),
    ):
        unknown = set(given) - set(known)
        if unknown:
            parser.error(f"{what} is {unknown.pop()!r}, expected some of: {', '.join(known)}")
    options.settings = dict(_settings(parser, text) for text in options.settings)
    options.earlier = {} if options.best_from is None else _earlier(parser, options.best_from)
    return options


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Options of all that runs engines in turns: where, how often, and in which sizes."""
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "peers")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "peers-work")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--scale", type=float, default=1.0, help="of all token counts")
    parser.add_argument(
        "--set", default="", metavar="NAME=N,...", help="sizes of the case, like groups=2,degree=4"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one run")
    parser.add_argument("--suffix", default="", help="appended to the result file's name")


def check_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name, least in (("repeats", 1), ("threads", 1), ("scale", 0), ("timeout", 0)):
        value = getattr(options, name)
        if value < least or value == 0:
            parser.error(f"--{name} is {value}, expected {'at least 1' if least else 'above 0'}")


def _settings(parser: argparse.ArgumentParser, text: str) -> tuple[str, dict[str, Any]]:
    """An engine and its settings, of one --settings."""
    engine, _, settings = text.partition(":")
    try:
        values = json.loads(settings)
    except json.JSONDecodeError:
        values = None
    if engine not in ENGINES or not isinstance(values, dict):
        known = ", ".join(ENGINES)
        parser.error(f"--settings has {text!r}, expected ENGINE:JSON-OBJECT, ENGINE of: {known}")
    return engine, values


def _earlier(parser: argparse.ArgumentParser, path: Path) -> dict[str, dict[str, Any]]:
    """The settings that an earlier result chose for each engine."""
    try:
        settings: dict[str, dict[str, Any]] = json.loads(path.read_text())["settings"]
    except (OSError, ValueError, KeyError) as error:
        parser.error(
            f"--best-from {path}: {type(error).__name__}: expected a result of this command"
        )
    return settings


def sized(case: Case, options: argparse.Namespace) -> Case:
    """The case in the sizes that were asked for."""
    fields = dataclasses.asdict(case.scaled(options.scale))
    for part in filter(None, options.set.split(",")):
        name, _, value = part.partition("=")
        if name not in SIZES or not value.isdigit():
            sys.exit(f"--set has {part!r}, expected NAME=NUMBER with one of: {', '.join(SIZES)}")
        fields[name] = int(value)
    return Case(**fields)


def measure(name: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    model = model_directory(options.work, case.shape, options.dtype)
    job = case.job(
        model=model, dtype=options.dtype, threads=options.threads, outputs=options.work / "outputs"
    )
    log = RunLog(options.work / f"{name}{options.suffix}", job, keep=options.resume)
    engines = options.engines.split(",")
    with Bench(
        job, options.environments, options.work, options.timeout, log.answers, options.stay
    ) as bench:
        runs_of = Turns(bench, log)
        rates = [bench.rates()]
        swept = sweep_all(runs_of, engines, options) if options.sweep else {}
        chosen = {engine: choice(engine, swept, name, options) for engine in engines}
        bench.load(chosen)
        with busy_cores(count=options.busy):
            runs = interleaved(runs_of, chosen, options.repeats, options.last_turn)
        rates.append(bench.rates())
    return summary(
        name=name,
        command=f"python -m onestem_lab.peers.run {shlex.join(sys.argv[1:])}",
        case=case,
        job=job,
        busy=options.busy,
        rates=rates,
        floor=floor(case.config, job),
        sweep=swept,
        settings=chosen,
        runs=runs,
    )


class Turns:
    """Runs of a job's engines, those that the log has taken from there."""

    def __init__(self, bench: Bench, log: RunLog) -> None:
        self.bench, self.log = bench, log

    def run(self, engine: str, settings: dict[str, Any], turn: int) -> dict[str, Any]:
        """Turn -1 is the sweep's; in others answers are compared."""
        key = {"engine": engine, "settings": settings, "turn": turn}
        result = self.log.find(key)
        if result is None:
            result = self.bench.run(engine, settings, keep=turn >= 0)
            self.log.add(key, result)
        return result


def sweep_all(
    runs_of: Turns, engines: list[str], options: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """One run of each setting of each peer, and of all together that made it faster."""
    swept = {}
    for engine in engines:
        tried = sweep(engine, options.dtype)
        if len(tried) == 1:
            continue
        runs = [runs_of.run(engine, settings, -1) for settings in tried]
        together = combined(engine, options.dtype, runs)
        if together not in tried:
            runs.append(runs_of.run(engine, together, -1))
        swept[engine] = runs
    return swept


def choice(
    engine: str,
    swept: dict[str, list[dict[str, Any]]],
    name: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Settings to run with: given, else the sweep's fastest, else an earlier result's."""
    if engine in options.settings:
        return dict(options.settings[engine])
    ran = [run for run in swept.get(engine, []) if "seconds" in run]
    if ran:
        return dict(min(ran, key=lambda run: run["seconds"])["settings"])
    if engine in options.earlier:
        return dict(options.earlier[engine])
    return default(engine, options.dtype)


def interleaved(
    runs_of: Turns, chosen: dict[str, dict[str, Any]], repeats: int, seconds: float
) -> dict[str, list[dict[str, Any]]]:
    """Every engine in turn, the order reversed each time; one that failed is not tried again. No
    turn but the first begins later than `seconds` from now."""
    last = time.monotonic() + seconds
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in chosen}
    for repeat in range(repeats):
        if repeat and time.monotonic() > last:
            break
        for engine in list(chosen)[:: 1 if repeat % 2 == 0 else -1]:
            if not any("error" in run for run in runs[engine]):
                runs[engine].append(runs_of.run(engine, chosen[engine], repeat))
    return runs


if __name__ == "__main__":
    main()

"""Hours of mixed hostile traffic: no engine may die, no answer may be wrong, no batch be lost.

    python -m onestem_lab.serve.hostile [--minutes 120 | --requests N] [--seed 0] [--clients 24]
        [--restart-every 180] [--attackers 3]

Clients ask a real `onestem serve` (embedded model, float32, on a CPU, so little KV memory that
requests are set back) for everything that can be asked, in pairs and triples, and for much that
cannot: broken and huge bodies, foreign hosts, wrong keys, connections that end anywhere, readers
and writers that are slow, prefixes, schemas and batches made and deleted under way. What a client
does next is drawn from (seed, client, step).

Good requests come from a pool. Their right answers are those of an engine in this process that
answers them one by one (some minutes); requests whose tokens change where weights do by a
hundred-thousandth are left out, since there rounding says what is right. An answer must have the
same texts, token ids, finish reasons and choices, and log-probabilities within 1e-4. A sampled
answer that goes another way from some token on counts as `drawn otherwise`, not as wrong, unless
--strict.

In the first third of the run the server is ended every --restart-every seconds (SIGTERM, SIGKILL,
SIGINT, SIGKILL of the engine alone, in turn) and started again. What is cut then is counted as
`cut`, not as a failure. Batches go on all the time and must end whole: each line once, in the
input's order, with the right answer, also those without a seed. Then the server lives on: of a
life of --judge-memory-after minutes or more, memory in the last quarter must be what it was in the
second, within 5% or 32 MiB (the larger; 256 MiB for grammar compilers).

Attackers come and go by windows of --window seconds: schemas that take the compiler long, texts
and bodies that are slow to read, many log-probabilities. Another key's plain requests and small
schemas are timed in each window. At the end memory must balance, nothing may be left running, and
each key must get a right answer.

Ends with code 1 after anything that was not expected. Written to lab/results/hostile.json,
with the first of these in full; the server's log is build/serve/hostile.log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from onestem.interrupts import exit_on_sigterm
from onestem_lab.load.server import free_port
from onestem_lab.results import RESULTS, ROOT, machine, write
from onestem_lab.serve.hostile_alone import Alone, clear_cases
from onestem_lab.serve.hostile_batches import is_whole
from onestem_lab.serve.hostile_memory import is_flat
from onestem_lab.serve.hostile_model import make_model
from onestem_lab.serve.hostile_pool import Case, cases
from onestem_lab.serve.hostile_run import traffic
from onestem_lab.serve.hostile_server import ENGINE, Server
from onestem_lab.serve.hostile_setting import Setting, server_command

__all__ = ["answering", "faults", "pool_of"]

Json = dict[str, Any]


def main() -> None:
    options = _options()
    setting = Setting(**{name: getattr(options, name) for name in Setting.__dataclass_fields__})
    log = ROOT / "build" / "serve" / "hostile.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    with exit_on_sigterm(), TemporaryDirectory() as folder:
        found = asyncio.run(_run(setting, Path(folder), log))
    found["log"] = _errors_of_log(log, found)
    wrong = faults(found, strict=options.strict)
    result = {
        "command": "python -m onestem_lab.serve.hostile " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "setting": vars(setting),
        "good": not wrong,
        "faults": wrong,
        **found,
    }
    path = RESULTS / f"hostile{options.suffix}.json"
    write(path, result)
    for line in _table(result):
        print(line)
    sys.exit(not result["good"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--requests", type=int, help="end after so many, in place of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--pool", type=int, default=1500, help="good requests that are drawn from")
    parser.add_argument("--kv-memory", default="32MiB")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-step-ms", type=float, help="default: the server's")
    parser.add_argument("--max-queue", type=int, default=48)
    parser.add_argument("--hang", type=float, default=300.0, help="seconds until an answer is lost")
    parser.add_argument("--pace", type=float, default=1.0, help="of the pauses that clients make")
    parser.add_argument(
        "--restart-every",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="end the server so often in the first third of the run; 0: never",
    )
    parser.add_argument(
        "--attackers", type=int, default=3, help="clients that do nothing else; 0: none"
    )
    parser.add_argument(
        "--window",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="without attacks, then with attacks, and so on",
    )
    parser.add_argument(
        "--judge-memory-after",
        dest="judge_after",
        type=float,
        default=20.0,
        metavar="MINUTES",
        help="that a process has lived; before, it grows until all code has run once",
    )
    parser.add_argument("--strict", action="store_true", help="what is drawn otherwise is wrong")
    parser.add_argument("--suffix", default="", help="appended to the result file's name")
    options = parser.parse_args()
    if options.requests is not None:
        options.minutes = None
    return options


async def _run(setting: Setting, folder: Path, log: Path) -> Json:
    """All of it, with a server of its own in `folder`."""
    model = make_model(folder / "model")
    port = free_port()
    server = Server(server_command(setting, model, folder, port), port, log)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as beside, closing(server):
        made = loop.run_in_executor(beside, _clear_pool, setting, model, folder / "shaken")
        await server.start()
        pool = await made
        print(f"{len(pool)} of {setting.pool} cases are clear", file=sys.stderr, flush=True)
        found = await traffic(server.url, pool, setting, answering(setting, model=model), server)
    return {"cases": len(pool), **found}


def pool_of(setting: Setting, **options: Any) -> list[Case]:
    """Good requests with the answers that they get alone; options are of `LLM`."""
    with Alone(**setting.engine, **options, seed=setting.seed) as alone:
        return alone.answered(cases(setting.seed, setting.pool, setting.max_model_len))


def _clear_pool(setting: Setting, model: Path, folder: Path) -> list[Case]:
    """Those whose answers rounding does not change; `folder` is to be made."""
    answered = pool_of(setting, model=model)
    return clear_cases(answered, model, folder, **setting.engine, seed=setting.seed)


def answering(setting: Setting, **options: Any) -> Callable[[Sequence[Case]], list[Case]]:
    """What gives cases the answers that they get alone; options are of `LLM`."""

    def answered(asked: Sequence[Case]) -> list[Case]:
        with Alone(**setting.engine, **options) as alone:
            return alone.answered(asked)

    return answered


# ----------------------------------------------------------------------------- the end


def _errors_of_log(log: Path, found: Json) -> Json:
    """How many errors of each kind the server has logged, and the first. That it says so of an
    engine that the benchmark has ended is none."""
    events, others = [], []
    for line in log.read_text(errors="replace").splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            others.append(line)
    bad = [event for event in events if isinstance(event, dict) and event.get("level") == "error"]
    kinds = Counter(event["event"] for event in bad)
    kinds["engine_down"] -= (found["restarts"] or {"by_kind": {}})["by_kind"].get(ENGINE, 0)
    return {"errors": dict(+kinds), "first": bad[:20], "no_events": others[:60]}


def faults(found: Json, *, strict: bool = False) -> list[str]:
    """What went wrong, each in some words; empty: nothing."""
    outcomes, after = found["outcomes"], found["after"]
    bad = ["wrong", "error", "engine down", "hung", *(["drawn otherwise"] if strict else [])]
    told = {f"{outcomes.get(name)} {name}": outcomes.get(name) for name in bad}
    told |= {
        f"{found['dead_engines']} dead engines": found["dead_engines"],
        f"unwell: {found['unwell']}": found["unwell"],
        f"errors in the log: {found.get('log', {}).get('errors')}": found.get("log", {}).get(
            "errors"
        ),
        "restarts went wrong": found["restarts"] and found["restarts"]["bad"],
        _batches_in_words(found["batches"]): not is_whole(found["batches"]),
        "memory grows": not is_flat(found["memory"]),
        f"left: {after.get('left', after)}": after.get("left", True),
        f"last answers: {after.get('answers')}": set(after.get("answers", {}).values())
        != {"right"},
    }
    return [words for words, is_so in told.items() if is_so]


def _batches_in_words(batches: Json) -> str:
    names = ("begun", "whole", "failed", "unfinished", "lost", "wrong")
    return "batches: " + ", ".join(f"{batches[name]} {name}" for name in names)


def _table(result: Json) -> Iterator[str]:
    yield f"{result['requests']} requests in {result['minutes']} minutes"
    yield "  ".join(f"{name} {count}" for name, count in result["outcomes"].items())
    for kind, counts in result["counts"].items():
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        yield f"  {kind:40} {told}"
    for name in ("dead_engines", "restarts", "memory", "latency", "short_seconds", "after"):
        yield f"{name}: {json.dumps(result[name])}"
    yield _batches_in_words(result["batches"])
    yield f"log: {json.dumps(result['log']['errors'])}"
    yield "good" if result["good"] else "NOT GOOD: " + "; ".join(result["faults"])


if __name__ == "__main__":
    main()

"""What a key notes while others send schemas that take the longest to compile.

    python -m onestem_lab.serve.schemas [--seconds 60] [--attackers 8] [--short]

A server with the embedded model, and a key for each attacker: each sends schemas of 20 KB that no
limit of schemas refuses, one after the other, each another one, with a timeout of 5 s. One more key
asks for plain answers of 5 tokens, and for answers to small schemas, each of them new; first
without the attack, then with it. Asked is that its plain answers take at most 1.2 times as long at
the 99th percentile, and its schemas less than 2 s. Written to
lab/results/serve-schemas.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from onestem_lab.load.client import open_client
from onestem_lab.load.figures import distribution
from onestem_lab.load.run import model_name
from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.results import RESULTS, machine, write

VICTIM = "victim"
PLAIN_RATIO, SCHEMA_SECONDS = 1.2, 2.0
TIMEOUT = 5
# Each is as long as a pattern may be, and the compiler takes the square of that or more.
NUM_PATTERNS, REPEATS = 20, 190


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="of each of the two parts")
    parser.add_argument("--attackers", type=int, default=8)
    parser.add_argument("--short", action="store_true", help="15 s a part, no result file")
    options = parser.parse_args()
    if options.short:
        options.seconds = 15
    names = [VICTIM, *(f"attacker{number}" for number in range(options.attackers))]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        (folder / "keys").write_text("".join(f"{name}:{_key(name)}\n" for name in names))
        port = free_port()
        model = ["--model=embedded", "--kv-memory=256MiB", f"--api-key-file={folder / 'keys'}"]
        url = stack.enter_context(serving(onestem_command(port, folder, model), port))
        found = asyncio.run(_measure(url, options.seconds, names[1:]))
    ratio = found["attacked"]["plain"]["p99"] / found["alone"]["plain"]["p99"]
    result = {
        "command": "python -m onestem_lab.serve.schemas " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "xgrammar": version("xgrammar"),
        **found,
        "plain_ratio": ratio,
        "limits": {"plain_ratio": PLAIN_RATIO, "schema_seconds": SCHEMA_SECONDS},
        "good": ratio <= PLAIN_RATIO and found["attacked"]["schema"]["max"] < SCHEMA_SECONDS,
    }
    print(json.dumps(result, indent=1))
    if not options.short:
        path = RESULTS / "serve-schemas.json"
        write(path, result)
    sys.exit(not result["good"])


def _key(name: str) -> str:
    return f"key-of-{name}-0001"


async def _measure(url: str, seconds: float, attackers: list[str]) -> dict[str, Any]:
    model, numbers = model_name(url, _key(VICTIM)), itertools.count()
    statuses: dict[str, int] = {}

    async def attack(name: str) -> None:
        async with open_client(url, _key(name), 60.0) as client:
            while True:
                status, _ = await _ask(client, model, _costly(next(numbers)), timeout=TIMEOUT)
                statuses[str(status)] = statuses.get(str(status), 0) + 1

    async with open_client(url, _key(VICTIM), 60.0) as client:
        await _answers(client, model, 2.0, numbers)  # all is loaded then
        alone = await _answers(client, model, seconds, numbers)
        tasks = [asyncio.create_task(attack(name)) for name in attackers]
        attacked = await _answers(client, model, seconds, numbers)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {"alone": alone, "attacked": attacked, "attackers_statuses": statuses}


async def _answers(
    client: httpx2.AsyncClient, model: str, seconds: float, numbers: itertools.count[int]
) -> dict[str, Any]:
    """Seconds of plain answers and of those to small schemas, in turn."""
    took: dict[str, list[float]] = {"plain": [], "schema": []}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        small = {"enum": ["yes", "no", next(numbers)]}
        for kind, schema in (("plain", None), ("schema", small)):
            status, one = await _ask(client, model, schema)
            if status != 200:
                raise RuntimeError(f"an answer ({kind}) has status {status}")
            took[kind].append(one)
    return {kind: distribution(each) | {"max": max(each)} for kind, each in took.items()}


async def _ask(
    client: httpx2.AsyncClient, model: str, schema: dict[str, Any] | None, **more: Any
) -> tuple[int, float]:
    """A completion's status and seconds."""
    body: dict[str, Any] = {"model": model, "prompt": "A short story:", "max_tokens": 5, **more}
    if schema is None:
        body["ignore_eos"] = True
    else:
        given = {"name": "answer", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": given}
    began = time.monotonic()
    answer = await client.post("/v1/completions", json=body)
    return answer.status_code, time.monotonic() - began


def _costly(number: int) -> dict[str, Any]:
    pattern = {"type": "string", "pattern": "[^x]?" * REPEATS}
    names = [f"p{number}_{place}" for place in range(NUM_PATTERNS)]
    return {"type": "object", "properties": dict.fromkeys(names, pattern), "required": names}


if __name__ == "__main__":
    main()

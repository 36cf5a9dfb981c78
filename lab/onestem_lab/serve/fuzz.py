"""Bodies that nobody would send: none is answered with a 5xx, and the engine lives.

    python -m onestem_lab.serve.fuzz [--bodies 100000] [--conversations 10000] [--seed 0]

Bodies have random fields of random types beside what a completion needs. Conversations are a good
one of an agent (system, user, calls, results, tools) with a few of its values replaced, dropped or
doubled. Ends with code 1 where an answer is a 5xx other than 504 (a request's own deadline), where
an error is not OpenAI's object or has several lines, or where the engine was started again. Written
to lab/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from onestem.openai.schema import ChatBody, CompletionBody
from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.results import RESULTS, machine, write

STREAMS = 16
FUNCTION = {
    "name": "find", "description": "Finds it.", "strict": True,
    "parameters": {"type": "object", "properties": {"what": {"enum": ["a", "b"]}},
                   "required": ["what"], "additionalProperties": False},
}  # fmt: skip
CONVERSATION = {
    "messages": [
        {"role": "developer", "content": "Be exact."},
        {"role": "user", "content": [{"type": "text", "text": "Find both."}], "name": "anna"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "find", "arguments": '{"what": "a"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 3, "temperature": 1.0,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bodies", type=int, default=100_000)
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        port = free_port()
        command = onestem_command(port, Path(folder), ["--kv-memory", "64MiB", "--timeout", "5"])
        with serving(command, port, log=log) as url:
            began = time.monotonic()
            found = asyncio.run(drive(url, requests(rng, options)))
            seconds = time.monotonic() - began
            metrics = httpx2.get(f"{url}/metrics").text
        restarts = sum(
            float(line.split()[-1])
            for line in metrics.splitlines()
            if line.startswith("onestem_engine_restarts_total")
        )
    good = not found["wrong"] and restarts == 0
    result = {
        "command": f"python -m onestem_lab.serve.fuzz --bodies {options.bodies} "
        f"--conversations {options.conversations}",
        "machine": machine(),
        "seconds": seconds,
        "restarts": restarts,
        **found,
        "good": good,
    }
    print(json.dumps(result, indent=1))
    write(RESULTS / "fuzz.json", result)
    sys.exit(not good)


def requests(rng: random.Random, options: Any) -> Iterator[tuple[str, bytes]]:
    for _ in range(options.bodies):
        chat = rng.random() < 0.5
        names = list((ChatBody if chat else CompletionBody).model_fields)
        needed = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": [5, 6]}
        body = {**needed, "max_tokens": 2}
        for _ in range(rng.randint(1, 4)):
            body[rng.choice(names)] = value(rng)
        yield ("/v1/chat/completions" if chat else "/v1/completions"), spelled(body)
    for _ in range(options.conversations):
        body = copy.deepcopy(CONVERSATION)
        for _ in range(rng.randint(1, 3)):
            disturb(rng, body)
        yield "/v1/chat/completions", spelled(body)


def spelled(body: Any) -> bytes:
    return json.dumps(body).encode()


def value(rng: random.Random, depth: int = 0) -> Any:
    kinds = 8 if depth < 3 else 6
    return [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice([-1, 0, 1, 2, 7, 1025, 2**31, 2**63, 2**70]),
        lambda: rng.choice([-1.0, 0.0, 0.5, 1.0, 1e30, float("nan")]),
        lambda: rng.choice(["", "a", "text", "auto", "\ud800", "é" * 9, "{", '{"type": "object"}']),
        lambda: rng.choice([[5], [[5]], ["a"], [{}], []]),
        lambda: [value(rng, depth + 1) for _ in range(rng.randint(0, 3))],
        lambda: {rng.choice(["type", "schema", "json_schema", "function", "name", "regex", "1"]):
                 value(rng, depth + 1) for _ in range(rng.randint(0, 3))},
    ][rng.randrange(kinds)]()  # fmt: skip


def disturb(rng: random.Random, body: Any) -> None:
    """Replace, drop or double one value, at any depth."""
    places = [(body, key) for key in body]
    for holder, key in places:
        inside = holder[key]
        if isinstance(inside, dict):
            places += [(inside, other) for other in inside]
        elif isinstance(inside, list):
            places += [(inside, index) for index in range(len(inside))]
    holder, key = rng.choice(places)
    how = rng.random()
    if how < 0.6:
        holder[key] = value(rng)
    elif how < 0.8:
        del holder[key]
    elif isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))


async def drive(url: str, waiting: Iterator[tuple[str, bytes]]) -> dict[str, Any]:
    statuses: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []

    async def one_by_one(client: httpx2.AsyncClient) -> None:
        for path, raw in waiting:
            headers = {"content-type": "application/json"}
            answer = await client.post(path, content=raw, headers=headers)
            statuses[str(answer.status_code)] += 1
            reason = fault(answer)
            if reason is not None:
                wrong.append({"path": path, "body": raw.decode(), "reason": reason})

    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        await asyncio.gather(*(one_by_one(client) for _ in range(STREAMS)))
    return {"statuses": dict(sorted(statuses.items())), "wrong": wrong[:20]}


def fault(answer: httpx2.Response) -> str | None:
    if answer.status_code == 200:
        return None
    if answer.status_code >= 500 and answer.status_code != 504:
        return f"status {answer.status_code}: {answer.text[:300]}"
    error = answer.json().get("error", {})
    if set(error) != {"message", "type", "param", "code"} or "\n" in error["message"]:
        return f"not an error of OpenAI's: {answer.text[:300]}"
    return None


if __name__ == "__main__":
    main()

"""Bodies that nobody would send: none is answered with a 5xx, and the engine lives.

    python -m onestem_lab.serve.fuzz [--bodies 100000] [--conversations 10000] [--servers 1]
        [--routes messages responses]

Bodies have random fields of random types beside what a route needs. Conversations are a good one
of an agent (system, user, calls, results, tools) with a few of its values replaced, dropped or
doubled. Routes are drawn. Ends with code 1 where an answer is a 5xx other than 504 (a request's own
deadline), where an error is not its API's object or has several lines, or where an engine was
started again. Written to lab/results/fuzz.json.
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
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from onestem.adapters.messages_read import CountBody, MessagesBody
from onestem.adapters.responses_read import ResponsesBody
from onestem.openai.schema import ChatBody, CompletionBody
from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.results import RESULTS, machine, write

STREAMS = 16
FUNCTION = {
    "name": "find", "description": "Finds it.", "strict": True,
    "parameters": {"type": "object", "properties": {"what": {"enum": ["a", "b"]}},
                   "required": ["what"], "additionalProperties": False},
}  # fmt: skip
SCHEMA = FUNCTION["parameters"]
CHAT = {
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
COUNTED = {
    "system": [{"type": "text", "text": "Be exact.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Find both."}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "text", "text": "So."},
            {"type": "tool_use", "id": "c1", "name": "find", "input": {"what": "a"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "is_error": False,
             "content": [{"type": "text", "text": "found"}]}]},
    ],
    "tools": [{"name": "find", "description": "Finds it.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}  # fmt: skip
ITEMS = {
    "instructions": "Be exact.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Find both."}]},
        {"type": "reasoning", "id": "r1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"what": "a"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
    ],
    "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required", "store": True,
    "reasoning": {"effort": "low"}, "max_output_tokens": 3, "temperature": 1.0,
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
}  # fmt: skip
USER = [{"role": "user", "content": "a"}]
# Of each route the model of its bodies, what one needs, and an agent's conversation.
ROUTES: dict[str, tuple[Any, dict[str, Any], dict[str, Any] | None]] = {
    "completions": (CompletionBody, {"prompt": [5, 6], "max_tokens": 2}, None),
    "chat/completions": (ChatBody, {"messages": USER, "max_tokens": 2}, CHAT),
    "messages": (MessagesBody, {"messages": USER, "max_tokens": 2}, COUNTED | {"max_tokens": 3}),
    "messages/count_tokens": (CountBody, {"messages": USER}, COUNTED),
    "responses": (ResponsesBody, {"input": "a", "max_output_tokens": 2}, ITEMS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bodies", type=int, default=100_000)
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--servers", type=int, default=1, help="that share the bodies")
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    options = parser.parse_args()
    began = time.monotonic()
    with ProcessPoolExecutor(options.servers) as pool:
        each = list(pool.map(partial(found_by, options), range(options.servers)))
    wrong = [one for _, some, _ in each for one in some]
    statuses = sum((one for one, _, _ in each), Counter())
    restarts = sum(one for _, _, one in each)
    good = not wrong and restarts == 0
    result = {
        "command": " ".join(["python -m onestem_lab.serve.fuzz", *sys.argv[1:]]),
        "machine": machine(),
        "seconds": time.monotonic() - began,
        "restarts": restarts,
        "sent": {path: sum(n for (to, _), n in statuses.items() if to == path)
                 for path in options.routes},
        "statuses": {path: {status: n for (to, status), n in sorted(statuses.items()) if to == path}
                     for path in options.routes},
        "wrong": wrong[:20],
        "good": good,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    write(RESULTS / "fuzz.json", result)
    sys.exit(not good)


def found_by(options: argparse.Namespace, server: int) -> tuple[Counter[Any], list[Any], int]:
    """What one of the servers answers to its part of the bodies: how many of each route and status,
    what is wrong with which, and how often its engine was started again."""
    rng = random.Random(f"{options.seed} {server}")
    with TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        port = free_port()
        flags = ["--kv-memory=64MiB", "--timeout=5", "--device=cpu"]
        command = onestem_command(port, Path(folder), flags)
        with serving(command, port, log=log) as url:
            statuses, wrong = asyncio.run(drive(url, requests(rng, options)))
            metrics = httpx2.get(f"{url}/metrics").text
    restarts = sum(
        int(float(line.split()[-1]))
        for line in metrics.splitlines()
        if line.startswith("onestem_engine_restarts_total")
    )
    return statuses, wrong, restarts


def requests(rng: random.Random, options: Any) -> Iterator[tuple[str, bytes]]:
    """Paths and bodies of one of the servers."""
    for _ in range(-(-options.bodies // options.servers)):
        path = rng.choice(options.routes)
        model, needed, _ = ROUTES[path]
        body = dict(needed)
        for _ in range(rng.randint(1, 4)):
            body[rng.choice(list(model.model_fields))] = value(rng)
        yield path, spelled(body)
    agents = [path for path in options.routes if ROUTES[path][2]]
    for _ in range(-(-options.conversations // options.servers) if agents else 0):
        path = rng.choice(agents)
        body = copy.deepcopy(ROUTES[path][2])
        for _ in range(rng.randint(1, 3)):
            disturb(rng, body)
        yield path, spelled(body)


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


async def drive(
    url: str, waiting: Iterator[tuple[str, bytes]]
) -> tuple[Counter[tuple[str, str]], list[dict[str, Any]]]:
    statuses: Counter[tuple[str, str]] = Counter()
    wrong: list[dict[str, Any]] = []

    async def one_by_one(client: httpx2.AsyncClient) -> None:
        for path, raw in waiting:
            headers = {"content-type": "application/json"}
            answer = await client.post(f"/v1/{path}", content=raw, headers=headers)
            statuses[path, str(answer.status_code)] += 1
            reason = fault(path, answer)
            if reason is not None:
                wrong.append({"path": path, "body": raw.decode(), "reason": reason})

    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        await asyncio.gather(*(one_by_one(client) for _ in range(STREAMS)))
    return statuses, wrong


def fault(path: str, answer: httpx2.Response) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if answer.status_code == 200:
        return None
    if answer.status_code >= 500 and answer.status_code != 504:
        return f"status {answer.status_code}: {answer.text[:300]}"
    error = answer.json().get("error", {})
    names = (
        {"type", "message"} if path.startswith("messages") else {"message", "type", "param", "code"}
    )
    if set(error) != names or "\n" in error["message"]:
        return f"not its API's error: {answer.text[:300]}"
    return None


if __name__ == "__main__":
    main()

"""How much of agents' sessions is computed twice?

    python -m onestem_lab.serve.sessions [--turns 60] [--system-tokens 30000] [--template qwen3]
        [--servers 1]

Sessions of three shapes are made from BFCL's multi-turn tasks (`sessions_data`): a coding agent
with two sub-agents, a research agent whose conversation branches, and four users at a time. They
are sent to a server through each of its APIs, as that API's clients keep them (`sessions_apis`).
The model has random weights, and is made to write what a trained one would (`sessions_server`).
Prompts and answers are those that the server hands to its engine and gets from it.

`ratio`: prompt tokens that the engine has computed, over the distinct tokens of the tree of all
prompts, less those that it has sampled itself. Asked: at most 1.01. Where a template writes an
earlier part of a conversation in another way, the tree has both. `ratio_as_written` leaves out what
is there a second time for that reason alone, and `rerendered` has it by cause. Nothing is shared
between two shapes or APIs, all of which are sent at the same time; KV memory has room for all.
Written to lab/results/serve-sessions-TEMPLATE.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from onestem.engine.text.tokenizer import Tokenizer
from onestem_lab.blocks import replaced
from onestem_lab.load.run import model_name
from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.results import LAB, RESULTS, machine, write
from onestem_lab.serve.sessions_apis import APIS, Client
from onestem_lab.serve.sessions_data import Plan, Sizes, Source, Turn, coding, research, users
from onestem_lab.serve.sessions_model import TEMPLATES, make_model, written
from onestem_lab.serve.sessions_server import SCRIPTS, TOLD, Told, told
from onestem_lab.serve.sessions_tree import Asked, Form, figures, total

__all__ = ["measured", "table"]

ASKED = 1.01
SHAPES = {"coding": coding, "research": research, "users": users}
PAGE = LAB / "notes" / "serving-benchmarks.md"
HEAD = """\
| template | shape, API | requests | prompt tokens | distinct | computed | ratio | rerendered | as written |
|---|---|---|---|---|---|---|---|---|"""  # noqa: E501 - a table


def main() -> None:
    options = _options()
    if options.table:
        PAGE.write_text(replaced(PAGE.read_text(), "onestem_lab.serve.sessions", table()))
        return
    sizes = Sizes(options.turns, options.system_tokens, options.result_tokens)
    if options.servers == 1:
        groups = [(options.shapes, options.apis)]
    else:
        groups = [([shape], [api]) for shape in options.shapes for api in options.apis]
    began = time.monotonic()
    with ProcessPoolExecutor(options.servers) as pool:
        run = partial(measured, options.template, sizes, kv_memory=options.kv_memory,
                      log=options.log)  # fmt: skip
        each = list(pool.map(run, *zip(*groups, strict=True)))
    parts = [part for one in each for part in one["parts"]]
    computed = sum(one["metrics_computed"] for one in each)
    result = {
        "command": " ".join(["python -m onestem_lab.serve.sessions", *sys.argv[1:]]),
        "machine": machine(),
        "template": options.template,
        "turns": sizes.turns,
        "system_tokens": sizes.system_tokens,
        "result_tokens": sizes.result_tokens,
        "seconds": time.monotonic() - began,
        "parts": parts,
        "total": {**total(parts), "metrics_computed": computed},
        "asked": ASKED,
        "good": all(one["good"] for one in each),
    }
    print(json.dumps(result, indent=1))
    if not options.short:
        write(RESULTS / f"serve-sessions-{options.template}{options.suffix}.json", result)
    sys.exit(not result["good"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--template", choices=TEMPLATES, default="qwen3")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--apis", nargs="+", choices=APIS, default=list(APIS))
    parser.add_argument("--turns", type=int, default=60, help="of the coding agent")
    parser.add_argument("--system-tokens", type=int, default=30_000, help="with tools")
    parser.add_argument("--result-tokens", type=int, default=8000, help="of the longest result")
    parser.add_argument("--kv-memory", default="2GiB")
    parser.add_argument("--servers", type=int, default=1, help="that run at a time")
    parser.add_argument("--log", type=Path, help="of one server (default: thrown away)")
    parser.add_argument("--suffix", default="", help="appended to the result file's name")
    parser.add_argument("--short", action="store_true", help="no result file")
    parser.add_argument("--table", action="store_true", help="write the note's table, and no more")
    return parser.parse_args()


def measured(
    template: str,
    sizes: Sizes,
    shapes: list[str],
    apis: list[str],
    kv_memory: str,
    *,
    log: Path | None = None,
) -> dict[str, Any]:
    """Figures of each shape through each API, by one server; `metrics_computed`: all prompt tokens
    that its engine has computed, as it says."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        model = make_model(folder / "model", template)
        tokenizer = Tokenizer.from_directory(model)
        assert tokenizer is not None
        source = Source(lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
        plans = {name: SHAPES[name](source, sizes) for name in shapes}
        files = {SCRIPTS: folder / "scripts.json", TOLD: folder / "told"}
        files[SCRIPTS].write_text(json.dumps(_scripts(plans, template, tokenizer)))
        files[TOLD].touch()
        port = free_port()
        flags = [f"--model={model}", "--random-weights", f"--kv-memory={kv_memory}"]
        flags += ["--dtype=float32", "--device=cpu"]
        command = onestem_command(port, folder / "state", flags)
        command[command.index("onestem")] = "onestem_lab.serve.sessions_server"
        environment = {name: str(file) for name, file in files.items()}
        url = stack.enter_context(serving(command, port, log=log, environment=environment))
        cells = [(shape, api) for shape in shapes for api in apis]
        sessions, counted = asyncio.run(_talk(url, plans, cells, files[TOLD]))
        header = tuple(tokenizer.encode_control("<|im_start|>assistant\n"))
        (end,) = tokenizer.encode_control("<|im_end|>")
        form = Form(header, end, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
        found = [
            {"shape": shape, "api": api, **figures(session, form)}
            for (shape, api), session in zip(cells, sessions, strict=True)
        ]
    return {
        "parts": found,
        "metrics_computed": counted,
        "good": all(one["ratio"] <= ASKED and not one["usage_differs"] for one in found)
        and counted == sum(one["computed"] for one in found),
    }


def _scripts(plans: Mapping[str, Plan], template: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each answer, by the number of its turn."""
    write_out = written(template)
    ids = {
        turn.number: tokenizer.encode_control(write_out(turn.answer))
        for plan in plans.values()
        for turn in plan.turns
    }
    return [ids.get(number, []) for number in range(max(ids) + 1)]


async def _talk(
    url: str, plans: Mapping[str, Plan], cells: list[tuple[str, str]], told_file: Path
) -> tuple[list[list[Asked]], int]:
    """Have the sessions of all cells at the same time; their requests, and the prompt tokens that
    the engine has computed, as `/metrics` says."""
    name = model_name(url)
    async with httpx2.AsyncClient(base_url=url, timeout=86400) as http:
        before = await _counted(http)
        each = (
            _session(http, plans[shape], APIS[api], {"model": name, "cache_salt": f"{shape} {api}"})
            for shape, api in cells
        )
        sessions = await asyncio.gather(*each)
        counted = await _counted(http) - before
    known = {one.request_id.rpartition("-")[0]: one for one in told(told_file)}
    return [_asked(session, known) for session in sessions], counted


@dataclass(frozen=True)
class _Sent:
    """A request that was answered: the answer's id, and that of the answer that it goes on from."""

    name: str
    before: str | None
    prompt_tokens: int
    cached: int


def _asked(session: list[_Sent], known: Mapping[str, Told]) -> list[Asked]:
    made: dict[str, Asked] = {}
    for one in session:
        before = None if one.before is None else made[one.before]
        made[one.name] = Asked(
            before=before,
            told=known[one.name],
            prompt_tokens=one.prompt_tokens,
            cached=one.cached,
        )
    return list(made.values())


async def _session(
    http: httpx2.AsyncClient, plan: Plan, kind: type[Client], common: dict[str, Any]
) -> list[_Sent]:
    """Have a plan's conversations; lanes at the same time."""
    clients: dict[str, Client] = {}
    said: dict[str, list[str]] = {}  # ids of each conversation's answers
    sent: list[_Sent] = []

    async def lane(turns: list[tuple[str, Turn]]) -> None:
        for name, turn in turns:
            if name not in clients:
                one = plan.conversations[name]
                new = clients[one.of].branch(one.after) if one.of else kind(one, common)
                clients[name], said[name] = new, said[one.of][: one.after] if one.of else []
            client = clients[name]
            answer = await http.post(client.path, json=client.body(turn))
            if answer.status_code != 200:
                raise SystemExit(f"{client.path}: {answer.status_code}: {answer.text[:300]}")
            found = answer.json()
            before = said[name][-1] if said[name] else None
            sent.append(_Sent(found["id"], before, *client.take(turn, found)))
            said[name].append(found["id"])

    await asyncio.gather(*map(lane, plan.lanes))
    return sent


async def _counted(http: httpx2.AsyncClient) -> int:
    """Prompt tokens that the engine has computed, as `/metrics` says."""
    text = (await http.get("/metrics")).text
    found = re.search(r"^onestem_engine_processed_prompt_tokens_total (\S+)", text, re.M)
    assert found is not None
    return int(float(found[1]))


# ----------------------------------------------------------------------------- the note's table


def table() -> str:
    """The table of all results."""
    rows = [row for path in sorted(RESULTS.glob("serve-sessions-*.json")) for row in _rows(path)]
    return "\n".join([HEAD, *rows])


def _rows(path: Path) -> Iterator[str]:
    result = json.loads(path.read_text())
    for part in result["parts"]:
        lost = ", ".join(f"{kind} {count:,}" for kind, count in part["rerendered"].items())
        cells = [
            result["template"],
            f"{part['shape']}, {part['api']}",
            *(f"{part[name]:,}" for name in ("requests", "prompt_tokens", "distinct", "computed")),
            f"{part['ratio']:.4f}",
            lost or "0",
            f"{part['ratio_as_written']:.3f}",
        ]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

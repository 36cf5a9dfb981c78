"""Requests behind one text that no server has seen: Onestem's and llama.cpp's own, on one file.

    python -m onestem_lab.peers.served MODEL.gguf --llama-server FILE | --llama-python DIR
        [--threads 2] [--turns 3] [--work 4x7400/32/64,64x4096/32/16] [--slots 1,4]
        [--dtype bfloat16]

`4x7400/32/64`: 4 requests at once behind 7,400 tokens, each with 32 of its own and an answer of 64.
Prompts are token ids, of a new text in each turn; seconds are those from the first request to the
last answer. All servers run side by side, and take turns. llama.cpp's slots are the requests that
it answers at a time: with one, requests wait and each finds the text of the one before; with more,
each slot computes it. Its fastest setting counts. With DIR, an environment of
`lab/onestem_lab/peers/install llama_cpp DIR`, its C interface does what one slot does: the server
takes no less. Written to lab/results/served.json.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from onestem.ops.cpu import status
from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.results import RESULTS, bare, machine, write

IDS = range(1_000, 30_000)  # none of them special
CONTEXT = 8192
OURS = "onestem"


class Work(NamedTuple):
    requests: int
    shared: int
    own: int
    answer: int

    @staticmethod
    def of(text: str) -> Work:
        return Work(*(int(part) for part in re.findall(r"\d+", text)))

    def prompts(self, seed: str) -> list[list[int]]:
        draw = random.Random(seed)
        shared = draw.choices(IDS, k=self.shared)
        return [shared + draw.choices(IDS, k=self.own) for _ in range(self.requests)]


def seconds_of(url: str, work: Work, prompts: list[list[int]]) -> float:
    """From the first request to the last answer."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        began = time.perf_counter()
        counts = list(threads.map(lambda prompt: asked(url, prompt, work.answer), prompts))
        took = time.perf_counter() - began
    if set(counts) != {work.answer}:
        raise SystemExit(f"{url} answered {sorted(set(counts))} tokens, expected {work.answer}")
    return took


def asked(url: str, prompt: list[int], tokens: int) -> int:
    """Tokens of the answer."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    connection = HTTPConnection(url.removeprefix("http://"), timeout=3600)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    try:
        return int(answer["usage"]["completion_tokens"])
    except KeyError:
        raise SystemExit(f"{url} answered {answer}") from None


@contextmanager
def ours(options: argparse.Namespace) -> Iterator[str]:
    flags = {"model": options.model.resolve(), "device": "cpu", "dtype": options.dtype,
             "kv-memory": "1GiB", "max-model-len": CONTEXT}  # fmt: skip
    port = free_port()
    with TemporaryDirectory() as state:
        command = onestem_command(port, Path(state), [f"--{k}={v}" for k, v in flags.items()])
        environment = {"OMP_NUM_THREADS": str(options.threads)}
        with serving(command, port, environment=environment) as url:
            yield url


@contextmanager
def theirs(options: argparse.Namespace, slots: int) -> Iterator[str]:
    port = free_port()
    flags = {"model": options.model.resolve(), "host": "127.0.0.1", "port": port,
             "parallel": slots, "ctx-size": slots * CONTEXT, "threads": options.threads,
             "flash-attn": "on"}  # fmt: skip
    command = [str(options.llama_server.resolve()), "--kv-unified"]
    command += [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    with serving(command, port) as url:
        yield url


@contextmanager
def their_slot(options: argparse.Namespace) -> Iterator[Callable[[Work, list[list[int]]], float]]:
    python = options.llama_python.absolute() / "bin" / "python"
    arguments = ("slot_llama_cpp.py", options.model.resolve(), options.threads, CONTEXT)
    with subprocess.Popen(
        [str(one) for one in (python, *arguments)],
        cwd=Path(__file__).parent / "runners",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def seconds(work: Work, prompts: list[list[int]]) -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([prompts, work.answer]) + "\n")
            process.stdin.flush()
            return float(process.stdout.readline())

        try:
            yield seconds
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--llama-python", type=Path)
    parser.add_argument("--work", default="4x7400/32/64,64x4096/32/16")
    parser.add_argument("--slots", default="1,4", help="of llama.cpp, each a server of its own")
    parser.add_argument("--dtype", default="bfloat16", help="of Onestem: 16 bits keep blocks")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "served.json")
    options = parser.parse_args()
    entries: dict[str, Any] = {}
    with ExitStack() as stack:
        sides = {OURS: partial(seconds_of, stack.enter_context(ours(options)))}
        if options.llama_python is not None:
            sides["llama.cpp's C interface, as one slot"] = stack.enter_context(their_slot(options))
        else:
            for slots in map(int, options.slots.split(",")):
                url = stack.enter_context(theirs(options, slots))
                sides[f"llama.cpp, slots: {slots}"] = partial(seconds_of, url)
        for seconds_by in sides.values():
            seconds_by(Work(1, 64, 1, 8), Work(1, 64, 1, 8).prompts("first"))
        for text in options.work.split(","):
            work, seconds = Work.of(text), {name: list[float]() for name in sides}
            for turn in range(options.turns):
                prompts = work.prompts(f"{text} {turn}")
                for name, seconds_by in sides.items():
                    seconds[name].append(seconds_by(work, prompts))
            medians = {name: statistics.median(took) for name, took in seconds.items()}
            best = min((name for name in sides if name != OURS), key=medians.__getitem__)
            pairs = zip(seconds[best], seconds[OURS], strict=True)
            ratios = [other / own for other, own in pairs]
            entries[text] = {
                "seconds": seconds,
                "median": medians,
                "best": best,
                "times llama.cpp": [statistics.median(ratios), min(ratios), max(ratios)],
            }
            print(text, json.dumps(entries[text]), flush=True)
            result = {
                "command": "python -m onestem_lab.peers.served MODEL.gguf "
                f"{'--llama-python DIR' if options.llama_python else '--llama-server FILE'} "
                f"--work {options.work} --slots {options.slots} --dtype {options.dtype} "
                f"--threads {options.threads} --turns {options.turns}",
                "machine": machine(),
                "extension": bare(status()),
                "model": options.model.name,
                "work": entries,
            }
            write(options.out, result)


if __name__ == "__main__":
    main()

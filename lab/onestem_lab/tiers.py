"""What keys and values below KV memory are worth: copied back against computed.

    python -m onestem_lab.tiers [--model shape:0.5b] [--tokens 8000] [--parts first sessions ...]

* `first`: seconds to the first token of a prompt of `--tokens` tokens: computed; from host memory,
  after other prompts have evicted it; from files, by a new engine (its files are in the page
  cache). `floor` is what these bytes take alone in the same process: the copy to the device from
  host memory; and, for files, reading, checking and copying with as many threads.
* `sessions`: `--sessions` conversations of `--session-tokens` tokens take turns, KV memory holds
  `--held` of them: prompt tokens that are computed though they were before, and the mean time to a
  first token, with host memory for all and without.
* `job`: 40 groups of 16 (2,000 + 200 tokens) twice over one folder, by two engines: prompt tokens
  that the second computes, and how many pieces it did not read because of its rates.
* `beside`: time between two tokens of 16 streams, while requests come whose prompt is in KV memory
  (`hits`), or has to be copied to it (`copies`): `--pairs` of both in turns, by one engine. The
  ratio is that of the medians of each kind's 99th percentiles.

Weights are random: times and counts do not depend on them. Written to lab/results/tiers-NAME.json.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from onestem import LLM, AsyncLLM, SamplingParams
from onestem.engine.tiers.stores import most_readers
from onestem_lab.results import RESULTS, device_name, machine, write

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
ROUNDS = 4
PINNING = 5.0  # seconds in which host memory is pinned, beside what runs
PERCENTILES = (50, 90, 95, 98, 99, 99.5, 100)  # of seconds between two tokens
PARTS = ("first", "sessions", "job", "beside")
Json = dict[str, Any]


def main() -> None:
    options = _options()
    result: Json = {
        "command": " ".join(["python -m onestem_lab.tiers", *sys.argv[1:]]),
        "machine": machine(),
        "device": device_name(torch.device(options.device)),
        "model": options.model,
        "dtype": options.dtype,
    }
    with TemporaryDirectory(dir=options.folder) as folder:
        for part in options.parts:
            result[part] = globals()[f"measure_{part}"](options, Path(folder) / part)
            print(part, result[part], flush=True)
            write(options.out, result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="shape:0.5b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--session-tokens", type=int, default=12_000)
    parser.add_argument("--held", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--groups", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--folder", help="of the files; a temporary one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    name = f"{options.model.removeprefix('shape:')}-{options.device}"
    options.out = options.out or RESULTS / f"tiers-{name}.json"
    return options


def _draw(rng: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in rng.integers(10, 30_000, count)]


def _llm(options: argparse.Namespace, kv_tokens: int, **more: Any) -> LLM:
    return LLM(
        options.model,
        device=options.device,
        dtype=options.dtype,
        kv_memory=kv_tokens * _token_bytes(options),
        seed=0,
        **more,
    )


def _token_bytes(options: argparse.Namespace) -> int:
    """Of keys and values."""
    if not hasattr(options, "token_bytes"):
        how = {"device": options.device, "dtype": options.dtype, "kv_memory": 1 << 30}
        with LLM(options.model, **how) as llm:
            options.token_bytes = (1 << 30) // llm.kv_tokens
    return int(options.token_bytes)


def _first(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and prompt tokens computed."""
    began = time.perf_counter()
    [output] = llm.generate([{"prompt_token_ids": prompt}], ONE, use_tqdm=False)
    return time.perf_counter() - began, output.metrics.num_computed_tokens


def _some(values: list[tuple[float, int]]) -> Json:
    seconds = sorted(one for one, _ in values)
    return {
        "median": round(statistics.median(seconds), 4),
        "least": round(seconds[0], 4),
        "most": round(seconds[-1], 4),
        "computed_tokens": sorted({count for _, count in values}),
    }


def measure_first(options: argparse.Namespace, folder: Path) -> Json:
    """See the module."""
    rng, count = np.random.default_rng(0), options.tokens
    prompts = [_draw(rng, count) for _ in range(options.repeats)]
    room = count + count // 4
    size = _token_bytes(options) * count
    found: Json = {"bytes": size}
    host = (options.repeats + 3) * size
    with _llm(options, room, host_kv=host) as llm:
        for _ in range(2):
            _first(llm, _draw(rng, count))
        found["computed"] = _some([_first(llm, prompt) for prompt in prompts])
        for _ in range(ROUNDS):  # pinned memory is taken beside the first ones
            found["host"] = _some([_first(llm, prompt) for prompt in prompts])
        found["in_kv_memory"] = _some([_first(llm, prompts[0]) for _ in prompts])
    kept = {"host_kv": host, "disk_kv": folder, "disk_kv_size": 64 << 30}
    with _llm(options, room, **kept) as llm:
        for prompt in prompts:
            _first(llm, prompt)
    with _llm(options, room, **kept) as llm:
        for _ in range(2):  # rates of computing and of the disk are measured here
            _first(llm, _draw(rng, count))
        time.sleep(PINNING if options.device != "cpu" else 0)
        _first(llm, prompts[0])
        found["disk"] = _some([_first(llm, prompt) for prompt in prompts[1:]])
    found["floor"] = _floor(options, folder, size)
    for tier in ("host", "disk"):
        found[f"{tier}_ratio"] = round(found[tier]["median"] / found["computed"]["median"], 4)
    return found


def _floor(options: argparse.Namespace, folder: Path, size: int) -> Json:
    """Seconds of copying so many bytes from host memory, and of reading and checking them."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=options.device != "cpu").fill_(1)
    target = torch.empty(size, dtype=torch.uint8, device=options.device)
    copies = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        if options.device != "cpu":
            torch.cuda.synchronize()
        copies.append(time.perf_counter() - began)
    files, total = [], 0
    for path in sorted(folder.iterdir()):
        if total < size:
            files.append(path)
            total += path.stat().st_size
    reads = []
    buffers = [np.empty(path.stat().st_size // 8 * 8, np.uint8) for path in files]
    for buffer in buffers:
        buffer.fill(1)
    readers = most_readers()
    with ThreadPoolExecutor(readers) as threads:
        for _ in range(3):
            began = time.perf_counter()
            list(threads.map(_read, files, buffers))
            reads.append((time.perf_counter() - began) * size / total)
    copy, read = statistics.median(copies), statistics.median(reads)
    return {"copy": round(copy, 4), "read": round(read, 4), "readers": readers}


def _read(path: Path, into: np.ndarray) -> int:
    with open(path, "rb") as file:
        count = file.readinto(into.data)
    return int(into[:count].view(np.uint64).sum(dtype=np.uint64)) + count


def measure_sessions(options: argparse.Namespace, folder: Path) -> Json:
    """See the module."""
    tokens = options.session_tokens
    room = options.held * (tokens + 200 * options.turns)
    size = _token_bytes(options) * options.sessions * (tokens + 100 * options.turns)
    found: Json = {}
    for name, kept in (("tiers", {"host_kv": int(1.02 * size)}), ("without", {})):
        rng = np.random.default_rng(1)
        with _llm(options, room, **kept) as llm:
            _first(llm, _draw(rng, tokens))
            talks = [_draw(rng, tokens) for _ in range(options.sessions)]
            times, again, prompted = [], 0, 0
            for turn in range(options.turns):
                for talk in talks:
                    own = len(talk) if turn == 0 else 100
                    seconds, computed = _first(llm, talk)
                    if turn:
                        times.append(seconds)
                        # What the turn adds, and the answer's one token, are new.
                        again += computed - own
                        prompted += len(talk) - own
                    talk += _draw(rng, 100)
            found[name] = {
                "mean_first_token": round(statistics.mean(times), 4),
                "computed_again": round(again / prompted, 4),
            }
    found["ratio"] = round(
        found["tiers"]["mean_first_token"] / found["without"]["mean_first_token"], 4
    )
    return found


def measure_job(options: argparse.Namespace, folder: Path) -> Json:
    """See the module."""
    rng = np.random.default_rng(2)
    heads = [_draw(rng, 2000) for _ in range(options.groups)]
    prompts = [{"prompt_token_ids": head + _draw(rng, 200)} for head in heads for _ in range(16)]
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    found: Json = {"own_tokens": 200 * len(prompts)}
    for name in ("first", "second"):
        with _llm(options, 60_000, disk_kv=folder, disk_kv_size=256 << 30) as llm:
            _first(llm, _draw(rng, 4000))
            _first(llm, _draw(rng, 4000))
            assert llm.engine.tiers is not None
            stores, answers = llm.engine.tiers.stores, list[bool]()
            stores.disk_pays = _noted(stores.disk_pays, answers)  # type: ignore[method-assign]
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found[name] = {
                "refused": answers.count(False),  # pieces that the rates had computed
                "row_seconds": stores.rates.row_seconds,
                "reader": stores.rates.reader(stores.rates.num_readers),
                "seconds": round(time.perf_counter() - began, 2),
                "computed_tokens": sum(one.metrics.num_computed_tokens for one in outputs),
                "disk_tokens": sum(one.metrics.num_disk_tokens for one in outputs),
            }
        names = (path.stem.split("-") for path in folder.iterdir())
        found[name]["tokens_in_files"] = sum(int(name[2]) for name in names)
    return found


def _noted(function: Callable[..., bool], answers: list[bool]) -> Callable[..., bool]:
    def noted(*arguments: Any) -> bool:
        answers.append(function(*arguments))
        return answers[-1]

    return noted


def measure_beside(options: argparse.Namespace, folder: Path) -> Json:
    """See the module."""
    return asyncio.run(_beside(options))


async def _beside(options: argparse.Namespace) -> Json:
    rng, count, streams = np.random.default_rng(3), options.tokens, 16
    prompts = [_draw(rng, count) for _ in range(6)]
    room = 2 * count + streams * 1400
    llm = AsyncLLM(
        options.model,
        device=options.device,
        dtype=options.dtype,
        kv_memory=room * _token_bytes(options),
        host_kv=16 * count * _token_bytes(options),
        seed=0,
    )
    found: Json = {}
    names = iter(range(10**9))

    async def ask(prompt: list[int]) -> int:
        last = None
        async for output in llm.generate({"prompt_token_ids": prompt}, ONE, f"ask-{next(names)}"):
            last = output
        assert last is not None
        return int(last.metrics.num_computed_tokens)

    for prompt in prompts:  # each is in host memory, or comes there with the next
        await ask(prompt)
    for kind in ("hits", "copies") * options.pairs:
        gaps: list[float] = []

        async def stream(gaps: list[float] = gaps) -> None:
            params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
            last, seen = None, 0
            prompt = {"prompt_token_ids": _draw(rng, 64)}
            async for output in llm.generate(prompt, params, f"stream-{next(names)}"):
                now, tokens = time.perf_counter(), len(output.outputs[0].token_ids)
                if last is not None and seen > 20:
                    gaps += [(now - last) / (tokens - seen)] * (tokens - seen)
                last, seen = now, tokens

        tasks = [asyncio.create_task(stream()) for _ in range(streams)]
        computed, asked = 0, 0
        await asyncio.sleep(0.5)
        while not all(task.done() for task in tasks):
            computed += await ask(prompts[0 if kind == "hits" else asked % len(prompts)])
            asked += 1
            await asyncio.sleep(0.25)
        await asyncio.gather(*tasks)
        seen = found.setdefault(kind, {"requests": [], "computed_tokens": []})
        seen["requests"].append(asked)
        seen["computed_tokens"].append(computed)
        for part in PERCENTILES:
            seen.setdefault(f"p{part}", []).append(round(float(np.percentile(gaps, part)), 5))
    await llm.close()
    for part in PERCENTILES:
        copies, hits = (statistics.median(found[kind][f"p{part}"]) for kind in ("copies", "hits"))
        found[f"p{part}_ratio"] = round(copies / hits, 3)
    return found


if __name__ == "__main__":
    main()

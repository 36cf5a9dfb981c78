"""What documents cost that are computed once and repaired in each prompt, against whole prompts.

    python -m onestem_lab.repair [--model shape:0.5b] [--dtype bfloat16] [--repair 0.2]
                                 [--parts first orders library]

`first`: the time to the first token of a prompt of five documents of 1,000 tokens and a question of
50, whose documents are in KV memory (in other prompts' order) against the same prompt whole: all of
it computed, or all behind its first document, which is in KV memory as a prefix; and the floors:
rows that are computed, of rows that the whole prompt has to compute. Each is timed directly after
another whole prompt, so that a GPU has the same clocks. `orders`: 64
prompts over 40 documents of 1,000 tokens, five each in random order: tokens computed and requests a
second, against prefix sharing. `library`: 64 prompts in PML over ten modules of 1,000 tokens, three
each, none where it was stored: requests a second, against modules in their places. The two take
turns. Random weights. Written to lab/results/repair-MODEL.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from onestem import LLM
from onestem.pml import Documents
from onestem.request import ONE_TOKEN, Request, RequestOutput, SamplingParams
from onestem_lab.pml import LibraryCase, measure_library
from onestem_lab.results import RESULTS, machine, write

PARTS = ["first", "orders", "library"]
HEAD, LEAD_IN, TOKENS, QUESTION = 40, 300, 1000, 50


class Prompts:
    """Prompts over a library of documents of random ids."""

    def __init__(self, llm: LLM, documents: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab_size = llm.engine.weights.decoder.config.vocab_size
        self._head, self._lead_in = self._ids(HEAD), tuple(self._ids(LEAD_IN))
        self._documents = [self._ids(TOKENS) for _ in range(documents)]
        self._count = 0

    def _ids(self, count: int) -> list[int]:
        return self._rng.integers(1000, self._vocab_size, count).tolist()

    def orders(self, count: int, each: int) -> list[list[int]]:
        """Choices of `each` documents, in random orders."""
        return [self._rng.permutation(len(self._documents))[:each].tolist() for _ in range(count)]

    def request(self, order: Sequence[int], repair: float, params: SamplingParams) -> Request:
        """A prompt of these documents with a question of its own."""
        ids, spans = list(self._head), []
        for number in order:
            spans.append((len(ids), len(ids) + TOKENS))
            ids += self._documents[number]
        self._count += 1
        return Request(
            request_id=str(self._count),
            prompt_token_ids=ids + self._ids(QUESTION),
            params=params,
            documents=Documents(tuple(spans), repair, self._lead_in) if repair < 1 else None,
        )


def run(llm: LLM, requests: Sequence[Request]) -> tuple[float, list[RequestOutput]]:
    """Seconds that requests take together, and their outputs."""
    began = time.perf_counter()
    outputs = list(llm.engine.run(requests))
    return time.perf_counter() - began, outputs


def computed(outputs: Sequence[RequestOutput]) -> int:
    return sum(output.metrics.num_computed_tokens for output in outputs)


def times_as_fast(ours: Sequence[tuple[float, int]], whole: Sequence[tuple[float, int]]) -> float:
    """The median of turns, by their seconds."""
    return round(median(its / mine for (mine, _), (its, _) in zip(ours, whole, strict=True)), 3)


def first_tokens(llm: LLM, repair: float, turns: int) -> dict[str, Any]:
    """The first token of 5,000 tokens of documents and a question."""
    # By what is computed before: documents with others' prompts, each behind the head; or none.
    ways = {"": ((0, 1, 2, 3, 4), (1, 0, 2, 3, 4)), "whole, ": ((0,),), "all computed, ": ()}
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for seed, (way, before) in enumerate(ways.items(), 3 * turn):
            prompts, share = Prompts(llm, 5, seed), 1.0 if way else repair
            for order in before:
                run(llm, [prompts.request(order, float(way != ""), ONE_TOKEN)])
            run(llm, [Prompts(llm, 5, 10**6 + seed).request(range(5), 1.0, ONE_TOKEN)])
            seconds, outputs = run(llm, [prompts.request((0, 3, 1, 4, 2), share, ONE_TOKEN)])
            if turn:
                found[way].append((seconds, computed(outputs)))
    ours, result = found[""], {}
    for way, those in found.items():
        result[f"{way}milliseconds"] = [round(seconds * 1000, 1) for seconds, _ in those]
        result[f"{way}tokens computed"] = those[0][1]
        if way:
            result[f"{way}times as fast"] = times_as_fast(ours, those)
            result[f"{way}floor, times as fast"] = round(those[0][1] / ours[0][1], 3)
    return result


def orders(llm: LLM, repair: float, turns: int, size: tuple[int, int, int]) -> dict[str, Any]:
    """Prompts over a library, in random orders."""
    count, library, output = size
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    found: dict[float, list[tuple[float, int]]] = {repair: [], 1.0: []}
    for turn in range(turns):
        for share in (repair, 1.0):
            prompts = Prompts(llm, library, seed=100 + 2 * turn + (share == 1.0))
            chosen = prompts.orders(count, 5)
            requests = [prompts.request(order, share, params) for order in chosen]
            seconds, outputs = run(llm, requests)
            found[share].append((seconds, computed(outputs)))
    ours, whole = found[repair], found[1.0]
    return {
        "prompts": count,
        "documents": library,
        "seconds": [round(seconds, 2) for seconds, _ in ours],
        "whole, seconds": [round(seconds, 2) for seconds, _ in whole],
        "tokens computed": [tokens for _, tokens in ours],
        "whole, tokens computed": [tokens for _, tokens in whole],
        "tokens of whole": round(
            median(a / b for (_, a), (_, b) in zip(ours, whole, strict=True)), 4
        ),
        "times as fast": times_as_fast(ours, whole),
    }


def library(llm: LLM, turns: int) -> dict[str, Any]:
    """Modules that are all moved, and the same in their places. The first turn warms up."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns + 1):
        for moved in found:
            case = measure_library(llm, LibraryCase(moved=moved, seed=turn))
            if turn:
                found[moved].append(round(case["requests_per_s"], 2))
    moved, stored = found[True], found[False]
    return {
        "requests per second": moved,
        "in their places, requests per second": stored,
        "times as fast": round(median(a / b for a, b in zip(moved, stored, strict=True)), 3),
    }


def parts(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    llm = LLM(
        options.model,
        device=options.device,
        dtype=options.dtype,
        kv_memory=options.kv_memory,
        max_model_len=8192,
    )
    if "first" in options.parts:
        yield "first", first_tokens(llm, options.repair, options.turns)
    if "orders" in options.parts:
        size = (options.prompts, options.documents, options.output)
        yield "orders", orders(llm, options.repair, options.turns, size)
    if "library" in options.parts:
        yield "library", library(llm, options.turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="shape:0.5b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repair", type=float, default=0.2)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:1])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--output", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--kv-memory", default="6GiB")
    parser.add_argument("--out", type=Path, help="else lab/results/repair-MODEL.json")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": " ".join(["python -m onestem_lab.repair", *sys.argv[1:]]),
        "model": options.model,
        "dtype": options.dtype,
        "repair": options.repair,
        "machine": machine(),
    }
    for name, part in parts(options):
        result[name] = part
        print(name, part, flush=True)
    name = f"repair-{options.model.removeprefix('shape:')}-{options.device}.json"
    write(options.out or RESULTS / name, result)


if __name__ == "__main__":
    main()

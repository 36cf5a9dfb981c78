"""Answers with documents as modules, moved and repaired in several ways, against the whole prompt.

    python -m onestem_lab.modules.evaluate MODEL [--only WAY ...] [--prompts 125] [--part 0/1]
    python -m onestem_lab.modules.evaluate --sum FOLDER [--out lab/results/modules.json]

The first form writes a line of JSON for each question into FOLDER (`--lines`), each with all ways;
eight questions are asked about each choice of documents. Several processes may take a part each.
The second adds up: right answers, those equal to the whole prompt's, the mean log-probability of
the whole prompt's answer (a token's, less the whole prompt's own), and tokens computed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from onestem_lab.modules import questions, real
from onestem_lab.modules.research import Research
from onestem_lab.modules.ways import WAYS
from onestem_lab.results import RESULTS, hardware, write

SHARES = (0.05, 0.1, 0.15, 0.2)
SETS = {"real": (real.questions, 5), "written": (questions.questions, 1)}
"""Each with its share of prompts: one in so many."""


def default_ways() -> Iterator[tuple[str, float, str]]:
    """Way, share and copies of each row of the tables."""
    for copies in ("anchored", "isolated", "neighbour", "own", "alike"):
        yield "none", 0.0, copies
    for way in WAYS:
        yield way, 0.2, "anchored"
    for way in ("attention", "attention, last third", "attention, last third, tokens"):
        for share in (0.05, 0.1, 0.15, 0.3, 0.5):
            yield way, share, "anchored"
    for copies in ("isolated", "neighbour", "own", "alike"):
        yield "attention, last third", 0.2, copies
    yield "attention", 1.0, "anchored"


def lines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    research = Research(options.model, options.device, getattr(torch, options.dtype))
    part, parts = map(int, options.part.split("/"))
    deadline = time.monotonic() + options.seconds
    chosen = [one for one in default_ways() if not options.only or one[0] in options.only]
    for name in options.sets:
        ask, one_in = SETS[name]
        for prompt in range(part, options.prompts // one_in, parts):
            for question in ask(range(prompt, prompt + 1)):
                if time.monotonic() > deadline:
                    return
                whole, full = research.whole(question)
                found = {
                    f"{way} {share} {copies}": research.repaired(
                        question, way, share, copies, full
                    )._asdict()
                    for way, share, copies in chosen
                }
                yield {
                    "set": name,
                    "kind": question.kind,
                    "whole": whole._asdict(),
                    "tokens": research.copies["whole"][0][0].shape[0],
                    "ways": found,
                }


def add_up(found: list[dict[str, Any]]) -> dict[str, Any]:
    right = sum(one["whole"]["right"] for one in found)
    ways: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        for way, answer in one["ways"].items():
            ways[way].append({**answer, "less": one["whole"]["logprob"] - answer["logprob"]})
    return {
        "questions": len(found),
        "right": right,
        "tokens": round(fmean(one["tokens"] for one in found)),
        "ways": {
            way: {
                "right": sum(one["right"] for one in answers),
                "of whole": round(sum(one["right"] for one in answers) / max(right, 1), 4),
                "equal": sum(one["equal"] for one in answers),
                "logprob less": round(fmean(one["less"] for one in answers), 4),
                "computed": round(
                    sum(one["computed"] for one in answers) / sum(one["moved"] for one in answers),
                    4,
                ),
            }
            for way, answers in ways.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="a Llama in one model.safetensors")
    parser.add_argument("--sum", type=Path, metavar="FOLDER", help="of lines")
    parser.add_argument("--lines", type=Path, default=Path("modules-lines"), metavar="FOLDER")
    parser.add_argument("--prompts", type=int, default=125, help="choices of documents")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--only", nargs="+", metavar="WAY")
    parser.add_argument("--part", default="0/1", help="which of how many")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no question after")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=RESULTS / "modules.json")
    options = parser.parse_args()
    if options.model is not None:
        options.lines.mkdir(parents=True, exist_ok=True)
        name = f"{'-'.join(options.sets)}-{options.part.replace('/', '-')}.jsonl"
        with (options.lines / name).open("w") as out:
            for line in lines(options):
                print(json.dumps(line), file=out, flush=True)
    if options.sum is not None:
        found = [
            json.loads(line) for one in sorted(options.sum.glob("*.jsonl")) for line in one.open()
        ]
        kinds = sorted({(one["set"], one["kind"]) for one in found})
        result = {
            "command": " ".join(["python -m onestem_lab.modules.evaluate", *sys.argv[1:]]),
            "machine": hardware("cuda" if options.device.startswith("cuda") else "cpu"),
            "whole by kind": {
                f"{of}, {kind}": [
                    sum(o["whole"]["right"] for o in found if (o["set"], o["kind"]) == (of, kind)),
                    sum((o["set"], o["kind"]) == (of, kind) for o in found),
                ]
                for of, kind in kinds
            },
            **{
                of: add_up([one for one in found if one["set"] == of])
                for of in sorted({one["set"] for one in found})
            },
        }
        write(options.out, result)
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""LongBench with contexts as modules: score and time to first token, cached against computed.

    python -m onestem_lab.longbench --model DIR DATA... [--limit 20] [--out FILE]

DATA are LongBench's files (hotpotqa.jsonl, also hotpotqa_e.jsonl) or the folder that holds them.
Each context is a module (each of its numbered passages, where it has such), computed before its
question comes; with `off` it is computed with the question. One request at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from onestem.errors import OnestemError
from onestem.llm import LLM
from onestem.pml import ISOLATIONS
from onestem_lab.longbench.load import find_files, read_examples
from onestem_lab.longbench.run import Answered, measure, summary
from onestem_lab.results import RESULTS, machine, write


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        examples = [
            example
            for file in find_files(options.data)
            for example in read_examples(file, options.limit)
        ]
        llm = LLM(
            options.model, dtype=options.dtype, device=options.device, kv_memory=options.kv_memory
        )
        answered = [
            one
            for isolation in options.isolation
            for one in measure(llm, examples, isolation, max_tokens=options.max_tokens)
        ]
    except OnestemError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    report = {
        "command": "python -m onestem_lab.longbench " + " ".join(arguments or sys.argv[1:]),
        "machine": machine(),
        "model": options.model,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "tasks": summary(answered),
    }
    write(options.out, report)
    if options.answers is not None:
        options.answers.write_text("".join(_line(one) for one in answered))
    show(report["tasks"])


def _line(one: Answered) -> str:
    fields = {"name": one.example.name, "isolation": one.isolation, "answer": one.text}
    return json.dumps({**fields, "score": one.score}, ensure_ascii=False) + "\n"


def show(tasks: dict) -> None:
    print(f"{'':34}{'score':>8}{'first token':>13}{'cached':>8}")
    for task, rows in tasks.items():
        for isolation, row in rows.items():
            name = f"{task}, {row['metric']}, {isolation}"
            seconds, cached = row["seconds_to_first_token"]["median"], row["cached_share"]
            print(f"{name:34}{row['score']:8.2f}{seconds:11.3f} s{cached:8.1%}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m onestem_lab.longbench", description=__doc__.splitlines()[0]
    )
    parser.add_argument("data", nargs="+", type=Path, metavar="DATA")
    parser.add_argument("--model", required=True, help="a model's directory, or `embedded`")
    parser.add_argument("--limit", type=int, help="examples of each file")
    parser.add_argument(
        "--isolation", nargs="+", choices=ISOLATIONS, default=list(ISOLATIONS), metavar="NAME"
    )
    parser.add_argument("--max-tokens", type=int, help="instead of each task's own")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-memory", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS / "longbench.json")
    parser.add_argument("--answers", type=Path, help="write each answer with its score (JSONL)")
    return parser


if __name__ == "__main__":
    main()

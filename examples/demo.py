"""The demo: questions about shared documents, answered with sharing and without, and checked.

Runs `facts.jsonl` (an OpenAI batch file: documents x questions in mixed order, and a few-shot part
with two levels of sharing) through `onestem batch`'s own code on the embedded model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from onestem.cli.batch import JobProgress
from onestem.jobs import run_file
from onestem.llm import LLM
from onestem.options import ShareMode

MODES: dict[ShareMode, str] = {"full": "shared", "off": "not shared"}
HERE = Path(__file__).parent


@dataclass
class Result:
    right: int
    total: int
    computed: int
    logical: int
    seconds: float
    answers: dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", type=Path, default=HERE / "facts.jsonl", help="OpenAI batch file")
    parser.add_argument(
        "--answers", type=Path, default=HERE / "facts.answers.json", help="custom_id -> answer"
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    expected = json.loads(options.answers.read_text())
    shared, apart = (run(options, expected, share) for share in MODES)
    show(shared, apart)
    if shared.right < 0.95 * shared.total:
        sys.exit("fewer than 95% of the answers are right")


def run(options: argparse.Namespace, expected: dict[str, str], share: ShareMode) -> Result:
    """Answer the job in one mode; the clock runs from opening the job to its last line."""
    llm = LLM(options.model, device=options.device, share=share, kv_memory="1GiB")
    label = MODES[share]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "answers.jsonl"
        started = time.perf_counter()
        print(f"{label}:", file=sys.stderr)
        with JobProgress() as progress:
            run_file(llm, options.job, output, on_progress=progress)
        seconds = time.perf_counter() - started
        answers = dict(map(read_answer, output.read_text().splitlines()))
    stats = llm.engine.stats
    right = sum(same(answers[name], expected[name]) for name in expected)
    return Result(
        right,
        len(expected),
        stats.processed_prompt_tokens,
        stats.logical_prompt_tokens,
        seconds,
        answers,
    )


def read_answer(line: str) -> tuple[str, str]:
    result = json.loads(line)
    if result["error"] is not None:
        return result["custom_id"], f"error: {result['error']['message']}"
    return result["custom_id"], result["response"]["body"]["choices"][0]["message"]["content"]


def same(answer: str, expected: str) -> bool:
    return answer.strip() == expected.strip()


def show(shared: Result, plain: Result) -> None:
    table = Table(title="The same job on the same engine")
    for heading in ("", "with sharing", "without"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row(
        "answers right", f"{shared.right} of {shared.total}", f"{plain.right} of {plain.total}"
    )
    table.add_row(
        "prompt tokens computed",
        f"{shared.computed:,} of {shared.logical:,}",
        f"{plain.computed:,} of {plain.logical:,}",
    )
    table.add_row("seconds", f"{shared.seconds:.1f}", f"{plain.seconds:.1f}")
    table.add_row("ratio", f"{plain.seconds / shared.seconds:.1f}x", "1.0x")
    equal = sum(shared.answers[name] == plain.answers[name] for name in plain.answers)
    table.add_row("answers equal", f"{equal} of {len(plain.answers)}", "")
    Console().print(table)


if __name__ == "__main__":
    main()

"""Exact match with documents as modules: `anchored`, `isolated` and `off`, 1 to 8 modules a prompt.

    python -m onestem_lab.pml_accuracy [--libraries 25] [--questions 16] [--dtype float32]

A library is a schema of eight of the embedded model's invented documents (test split: names and
values that training never drew). Each prompt imports some of them and asks for one fact. All three
ways of encoding get the same prompts, with the same tokens at the same positions; an answer is
right if it is the same text, character by character. Results: lab/results/pml-accuracy.json.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onestem.llm import LLM
from onestem.pml import ISOLATIONS, Import, Module, Prompt, Role, Schema
from onestem.request import SamplingParams
from onestem_lab.results import RESULTS, ROOT, machine, write

sys.path.insert(0, str(ROOT / "training"))

import documents

MODULES = 8
FACTS = (9, 12)  # of a document: eight of them are as long as those that training drew
QUESTIONS_A_CHOICE = 4  # that one choice of modules is asked
HELD_OUT_SHARE = 0.25  # of questions in a phrasing that training never saw
MAX_TOKENS = 40


@dataclass(frozen=True)
class Library:
    """A schema whose modules are documents, in their order."""

    schema: Schema
    documents: tuple[documents.Document, ...]


@dataclass(frozen=True)
class Asked:
    """A prompt that imports `modules` of a library's documents, and the right answer."""

    prompt: Prompt
    answer: str
    modules: int
    held_out: bool


def make_library(number: int) -> Library:
    """Names are unique in a library, so that one document alone answers a question."""
    namer = documents.Namer(random.Random(f"test library {number}"), "test")
    drawn = tuple(_document(namer) for _ in range(MODULES))
    modules = [Module(module_name(i), [one.text]) for i, one in enumerate(drawn)]
    system = documents.instructions(namer.rng)
    body = [Role("system", [system]), Role("user", modules)]
    return Library(Schema(f"library-{number}", body), drawn)


def module_name(index: int) -> str:
    return f"document-{index + 1}"


def _document(namer: documents.Namer) -> documents.Document:
    """One without names of control tokens, which are text in PML and tokens in training."""
    while True:
        document = documents.make_document(namer, namer.rng.randint(*FACTS))
        if documents.UNK not in document.text:
            return document


def ask_all(number: int, library: Library, questions: int) -> Iterator[Asked]:
    """`questions` prompts for each number of modules, over choices drawn at random."""
    rng = random.Random(f"test asked {number}")
    for modules in range(1, MODULES + 1):
        for first in range(0, questions, QUESTIONS_A_CHOICE):
            chosen = sorted(rng.sample(range(MODULES), modules))
            for _ in range(min(QUESTIONS_A_CHOICE, questions - first)):
                yield ask_one(rng, library, chosen)


def ask_one(rng: random.Random, library: Library, chosen: Sequence[int]) -> Asked:
    fact = rng.choice(library.documents[rng.choice(chosen)].facts)
    held_out = rng.random() < HELD_OUT_SHARE
    question = documents.ask(rng, fact, held=held_out)
    body = [*(Import(module_name(i)) for i in chosen), f"Question: {question.text}"]
    prompt = Prompt(library.schema.name, body)
    return Asked(prompt, question.answer, len(chosen), held_out)


def measure(
    llm: LLM, libraries: Sequence[Library], asked: Sequence[Asked], isolation: str
) -> dict[str, object]:
    for library in libraries:
        llm.add_schema(library.schema)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    outputs = llm.generate_pml([one.prompt for one in asked], params, isolation=isolation)
    answers = [output.outputs[0].text.strip() for output in outputs]
    right = [answer == one.answer for answer, one in zip(answers, asked, strict=True)]
    counts = range(1, MODULES + 1)
    return {
        "all": tally(asked, right),
        "held-out phrasings": tally(asked, right, lambda one: one.held_out),
        **{f"{n} modules": tally(asked, right, lambda one, n=n: one.modules == n) for n in counts},
        "prompt_tokens": sum(output.metrics.num_prompt_tokens for output in outputs),
        "cached_tokens": sum(output.metrics.num_cached_tokens for output in outputs),
    }


def tally(asked: Sequence[Asked], right: Sequence[bool], counts=lambda one: True) -> dict:
    marks = [mark for one, mark in zip(asked, right, strict=True) if counts(one)]
    percent = round(100 * sum(marks) / len(marks), 2) if marks else None
    return {"questions": len(marks), "right": sum(marks), "percent": percent}


def differences(results: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Points that an isolation loses against the baseline, per number of modules."""
    rows = ["all", *(f"{n} modules" for n in range(1, MODULES + 1))]
    off = results["off"]
    return {
        isolation: {
            row: round(off[row]["percent"] - results[isolation][row]["percent"], 2) for row in rows
        }
        for isolation in results
        if isolation != "off"
    }


def show(results: dict[str, dict]) -> None:
    print(f"{'':12}" + "".join(f"{isolation:>12}" for isolation in results))
    for row in ["all", *(f"{n} modules" for n in range(1, MODULES + 1)), "held-out phrasings"]:
        percents = [result[row]["percent"] for result in results.values()]
        print(f"{row:20}" + "".join(f"{percent:12}" for percent in percents))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--libraries", type=int, default=25)
    parser.add_argument("--questions", type=int, default=16, help="per library and modules")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS / "pml-accuracy.json")
    options = parser.parse_args()
    libraries = [make_library(number) for number in range(options.libraries)]
    asked = [
        one
        for number, library in enumerate(libraries)
        for one in ask_all(number, library, options.questions)
    ]
    results = {}
    for isolation in ISOLATIONS:
        llm = LLM(device=options.device, dtype=options.dtype, kv_memory="1GiB")
        results[isolation] = measure(llm, libraries, asked, isolation)
    report = {
        "command": "python -m onestem_lab.pml_accuracy "
        f"--libraries {options.libraries} --questions {options.questions} --dtype {options.dtype}",
        "machine": machine(),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "points_below_off": differences(results),
        "results": results,
    }
    write(options.out, report)
    show(results)


if __name__ == "__main__":
    main()

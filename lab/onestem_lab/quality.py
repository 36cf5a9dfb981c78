"""What formats of weights and modules cost a trained model: right answers, and perplexity.

    python -m onestem_lab.quality MODEL [modules] [formats] [--device cuda]

MODEL is an instruct model; SmolLM2-135M-Instruct was measured. `modules`: questions over two of six
documents that a script writes, each document a module, in every isolation. `formats`: the same
questions without modules, and the perplexity of English text (Python's own help topics), in every
number format, with sharing and without. Answers are greedy. One is right if the fact that was asked
for is in it. Results: lab/results/quality.json, in which each task replaces its own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from onestem import LLM, SamplingParams
from onestem.pml import ISOLATIONS, Import, Module, Prompt, Role, Schema
from onestem_lab.modules.questions import NAMES, SYSTEM, VALUES
from onestem_lab.results import RESULTS, hardware, write

FACTS = {
    "city": ("{name} lives in {value}.", "In which city does {name} live?"),
    "job": ("{name} works as a {value}.", "What is the job of {name}?"),
    "pet": ("{name} has a pet, a {value}.", "Which animal is the pet of {name}?"),
    "food": ("The favourite food of {name} is {value}.", "What is the favourite food of {name}?"),
    "colour": ("{name} drives a {value} car.", "Which colour is the car of {name}?"),
    "month": ("The birthday of {name} is in {value}.", "In which month was {name} born?"),
}
FILLERS = (
    "The neighbours say that {name} is kind and always on time.",
    "On most evenings {name} takes a walk along the river before dinner.",
    "Years ago {name} travelled for a whole summer and wrote many letters home.",
    "There is a small garden behind the house, and {name} looks after it.",
    "At the weekend {name} likes to read the newspaper from the first page to the last.",
    "When it rains, {name} stays at home and listens to the radio.",
)
LIBRARIES, DOCUMENTS, IMPORTED, QUESTIONS = 20, 6, 2, 15
ANSWER = SamplingParams(temperature=0.0, max_tokens=24)

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
TEXT_TOKENS, WINDOW = 50_000, 1_000


class Question(NamedTuple):
    """Which documents a prompt imports, what it asks, and the word that is right."""

    library: int
    imported: tuple[int, ...]
    text: str
    right: str


def documents_of(library: int) -> list[tuple[str, dict[str, str], str]]:
    """Name of a person, the facts, and the text that tells them, of each document."""
    draw = random.Random(library)
    found = []
    for name in draw.sample(NAMES, DOCUMENTS):
        facts = {kind: draw.choice(values.split()) for kind, values in VALUES.items()}
        told = [FACTS[kind][0].format(name=name, value=value) for kind, value in facts.items()]
        told += [filler.format(name=name) for filler in draw.sample(FILLERS, 4)]
        draw.shuffle(told)
        found.append((name, facts, f"About {name}: {' '.join(told)}\n"))
    return found


def questions() -> list[Question]:
    asked = []
    for library in range(LIBRARIES):
        draw, documents = random.Random(f"asked {library}"), documents_of(library)
        for _ in range(QUESTIONS):
            imported = tuple(sorted(draw.sample(range(DOCUMENTS), IMPORTED)))
            name, facts, _text = documents[draw.choice(imported)]
            kind = draw.choice(list(facts))
            asked.append(Question(library, imported, FACTS[kind][1].format(name=name), facts[kind]))
    return asked


def schema_of(library: int) -> Schema:
    modules = [
        Module(f"document-{index}", [text])
        for index, (_, _, text) in enumerate(documents_of(library))
    ]
    return Schema(f"library-{library}", [Role("system", [SYSTEM]), Role("user", modules)])


def by_modules(llm: LLM, isolation: str) -> list[str]:
    """Answers to all questions."""
    for library in range(LIBRARIES):
        llm.add_schema(schema_of(library))
    prompts = [
        Prompt(
            f"library-{one.library}", [*(Import(f"document-{i}") for i in one.imported), one.text]
        )
        for one in questions()
    ]
    return [out.outputs[0].text for out in llm.generate_pml(prompts, ANSWER, isolation=isolation)]


def by_chats(llm: LLM, asked: Sequence[Question]) -> list[str]:
    """Answers to the same prompts as chats."""
    chats = []
    for one in asked:
        documents = documents_of(one.library)
        body = "".join(documents[index][2] for index in one.imported)
        chats.append(
            [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{body}{one.text}"},
            ]
        )
    return [out.outputs[0].text for out in llm.chat(chats, ANSWER)]


def num_right(answers: Sequence[str]) -> int:
    return sum(
        one.right.lower() in answer.lower()
        for one, answer in zip(questions(), answers, strict=True)
    )


def window_scores(llm: LLM, windows: int = TEXT_TOKENS // WINDOW) -> list[list[float]]:
    """Log-probabilities of a text's tokens, in windows of `WINDOW` that begin anew."""
    from pydoc_data.topics import topics

    (ids,) = llm.tokenize(["\n\n".join(topics[name] for name in sorted(topics))])
    parts = [list(ids[at * WINDOW : (at + 1) * WINDOW]) for at in range(windows)]
    scores = llm.score([part[:1] for part in parts], [[part[1:]] for part in parts])
    return [list(one.token_logprobs) for (one,) in scores]


def perplexity(llm: LLM) -> float:
    """Of a text of `TEXT_TOKENS` tokens."""
    return math.exp(-fmean(value for window in window_scores(llm) for value in window))


def modules(options: argparse.Namespace) -> dict[str, Any]:
    """Right answers in each isolation, and how many are those of `off`."""
    answers = {}
    for isolation in ISOLATIONS:
        with load(options, {"dtype": options.dtype}) as llm:
            answers[isolation] = by_modules(llm, isolation)
    return {
        isolation: {
            "right": num_right(answers[isolation]),
            "questions": len(answers["off"]),
            "equal to off": sum(a == b for a, b in zip(answers[isolation], answers["off"])),
        }
        for isolation in answers
    }


def formats(options: argparse.Namespace) -> dict[str, Any]:
    """Perplexity and right answers in each format, shared and not."""
    found = {}
    for name, settings in FORMATS.items():
        rows: dict[str, Any] = {}
        for share in ("full", "off"):
            with load(options, {**settings, "share": share}) as llm:
                answers = by_chats(llm, questions())
                rows[share] = {"right": num_right(answers), "perplexity": perplexity(llm)}
                rows.setdefault("answers", []).append(answers)
        one, other = rows.pop("answers")
        rows["equal shared and not"] = sum(a == b for a, b in zip(one, other))
        found[name] = rows
        print(name, rows, flush=True)
    return {"questions": len(questions()), **found}


def load(options: argparse.Namespace, settings: dict[str, Any]) -> LLM:
    return LLM(options.model, device=options.device, kv_memory="4GiB", **settings)


TASKS = {"modules": modules, "formats": formats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32", help="of modules")
    parser.add_argument("--out", type=Path, default=RESULTS / "quality.json")
    options = parser.parse_args()
    before = json.loads(options.out.read_text())["tasks"] if options.out.exists() else {}
    for name in options.tasks or TASKS:
        before[name] = TASKS[name](options)
        print(name, json.dumps(before[name], indent=1), flush=True)
    result = {
        "command": " ".join(["python -m onestem_lab.quality", *sys.argv[1:]]),
        "machine": hardware("cuda" if options.device.startswith("cuda") else "cpu"),
        "model": Path(options.model).name,
        "tasks": before,
    }
    write(options.out, result)


if __name__ == "__main__":
    main()

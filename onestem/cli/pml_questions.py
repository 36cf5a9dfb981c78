"""What `onestem pml compare` does with a file of questions: answers them in every isolation, and
says which one to use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import comb
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from onestem.batch.lines import lines_of, open_file, unseen
from onestem.checked import Object, check
from onestem.cli.options import check_answered
from onestem.cli.pml_run import load_library
from onestem.errors import ConfigError
from onestem.openai.read import read_object
from onestem.pml import Prompt, parse_prompt
from onestem.request import SamplingParams

if TYPE_CHECKING:
    from onestem.llm import LLM

_Line = TypeVar("_Line", bound=Object)
CHANCE = 0.05
FEW = 30  # right answers; fewer show large losses alone


class Question(NamedTuple):
    """A prompt, and what is in a right answer to it; None: not known."""

    place: str
    prompt: Prompt
    answer: str | None


class Line(Object):
    """A line of a file of questions."""

    pml: str
    answer: str | None = None


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSONL file, of which each line is {"pml": MARKUP, "answer": TEXT}.

    Raises:
        ConfigError: there is none.
        RequestError: with the line, if one is something else.
    """
    told = "question: a line of it is {'pml': ..., 'answer': ...}"
    return [
        Question(place, parse_prompt(line.pml, file=place), line.answer)
        for place, line in read_lines(path, Line, told)
    ]


def read_lines(path: Path, kind: type[_Line], told: str) -> Iterator[tuple[str, _Line]]:
    """The lines of a JSONL file, each with its place.

    Raises:
        ConfigError: the file has none: it holds no `told`.
        RequestError: with the line, if one is something else.
    """
    place = None
    with open_file(path) as file:
        for number, raw in lines_of(file, unseen):
            if isinstance(raw, Exception):
                raise raw
            place = f"{path}:{number}"
            yield place, check(kind, read_object(raw, place), place)
    if place is None:
        raise ConfigError(f"{path} holds no {told}")


def ask_all(
    llm: LLM,
    path: Path,
    questions: Sequence[Question],
    isolations: Sequence[str],
    params: SamplingParams,
    schemas: list[Path] | None,
) -> list[dict[str, Any]]:
    """Facts of each question, for JSON: its text in each isolation, and how many prompt tokens were
    computed for it."""
    prompts = [question.prompt for question in questions]
    for prompt in {prompt.schema: prompt for prompt in prompts}.values():
        load_library(llm, path, prompt, schemas)
    facts: list[dict[str, Any]] = [
        {"prompt": question.place, "answer": question.answer, "texts": {}, "computed_tokens": {}}
        for question in questions
    ]
    for isolation in isolations:
        outputs = llm.generate_pml(prompts, params, isolation=isolation)
        for one, output in zip(facts, outputs, strict=True):
            check_answered(output, one["prompt"])
            one["texts"][isolation] = output.outputs[0].text
            one["computed_tokens"][isolation] = output.metrics.num_computed_tokens
    return [marked(one) for one in facts]


def marked(one: dict[str, Any]) -> dict[str, Any]:
    """Facts of a question with whether each text is right: it has the answer in it, in any case."""
    if (answer := one["answer"]) is not None:
        one["right"] = {mode: answer.lower() in text.lower() for mode, text in one["texts"].items()}
    return one


def summary(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of each mode, and the verdict. The first mode is what others are compared with.

    `lost` are questions that it has right and this mode has not, `won` the others of which one
    alone is right. `chance` is the probability of as many losses or more among them if both
    were equally good (a sign test).
    """
    known = [one for one in facts if one["answer"] is not None]
    modes: dict[str, dict[str, Any]] = {}
    base = next(iter(facts[0]["texts"]))
    for mode in facts[0]["texts"]:
        modes[mode] = counts = {
            "computed_tokens": sum(one["computed_tokens"][mode] for one in facts),
            f"equal_to_{base}": sum(one["texts"][mode] == one["texts"][base] for one in facts),
        }
        if "logprobs" in facts[0]:
            counts["logprob"] = fmean(one["logprobs"][mode] for one in facts)
        if known:
            marks = [(one["right"][base], one["right"][mode]) for one in known]
            lost, won = marks.count((True, False)), marks.count((False, True))
            tail = sum(comb(lost + won, count) for count in range(lost, lost + won + 1))
            counts |= {"right": sum(mark for _, mark in marks), "lost": lost, "won": won}
            counts["chance"] = tail / 2 ** (lost + won)
    told: dict[str, Any] = {"questions": len(facts), "with_answers": len(known), "modes": modes}
    return told | {"verdict": _verdict(told)}


def _verdict(told: Mapping[str, Any]) -> str:
    (base, whole), *cached = told["modes"].items()
    equal = f"equal_to_{base}"
    count, known = told["questions"], told["with_answers"]
    if not known:
        name, best = max(cached, key=lambda mode: mode[1][equal])
        if best[equal] == count:
            return f"use {name}: all {count} answers are those of {base}"
        return (
            f"use {base}, unless other answers are as good: {name} has {base}'s text in "
            f'{best[equal]} of {count}; with "answer" in the lines, right ones are counted'
        )
    if not whole["right"]:
        return f"no verdict: {base} has none of {known} right; ask what the model can answer"
    few = (
        ""
        if whole["right"] >= FEW
        else (f"; {whole['right']} right answers show large losses alone, ask for {FEW} or more")
    )
    kept = [mode for mode in cached if mode[1]["chance"] >= CHANCE]
    if kept:
        name, best = max(kept, key=lambda mode: mode[1]["right"])
        return (
            f"use {name}: {best['right']} of {known} right, {base} {whole['right']}, a difference "
            f"that chance explains{few}"
        )
    name, best = max(cached, key=lambda mode: mode[1]["right"])
    return (
        f"use {base}: {name} loses {best['lost']} right answers of {base}'s {whole['right']} and "
        f"wins {best['won']}, more than chance explains{few}"
    )


def summary_lines(name: str, told: Mapping[str, Any]) -> Iterator[str]:
    """`summary`, for people."""
    yield f"{name}: {told['questions']} questions, {told['with_answers']} with answers"
    base = next(iter(told["modes"]))
    for mode, counts in told["modes"].items():
        right = f"{counts['right']} right, " if "right" in counts else ""
        nats = f"{counts['logprob']:+.3f} nats per token, " if "logprob" in counts else ""
        yield (
            f"  {mode:9} {right}{counts[f'equal_to_{base}']} with the text of {base}, {nats}"
            f"{counts['computed_tokens']} prompt tokens computed"
        )
    yield told["verdict"]

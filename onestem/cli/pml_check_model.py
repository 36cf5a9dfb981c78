"""What `onestem pml check-model` does: chats whose documents are repaired, beside the same ones
computed whole."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from onestem.checked import Object
from onestem.cli.options import check_answered
from onestem.cli.pml_questions import marked, read_lines
from onestem.errors import RequestError
from onestem.request import Completion, SamplingParams

if TYPE_CHECKING:
    from onestem.llm import LLM

WHOLE = "whole"
TOP = 20  # tokens beside the sampled one, among which that of the whole prompt's answer is found
NAMES = ("Marie", "John", "Ahmed", "Yuki", "Olga", "Pedro")
FACTS = {  # how a sentence begins, what asks for its end, and ends
    "{} lives in": ("In which city does {} live?", "Lyon Boston Cairo Osaka Lima Oslo Delhi"),
    "{} works as a": ("What is the job of {}?", "baker teacher doctor farmer painter pilot"),
    "The pet of {} is a": ("Which animal is the pet of {}?", "dog cat parrot rabbit horse goat"),
    "{} likes to eat": ("What does {} like to eat?", "rice bread soup cheese honey salad"),
}
THINGS = ("lamp", "chair", "table", "clock", "mirror", "carpet", "guitar", "camera", "radio", "bed")
ROOMS = 24  # sentences that answer nothing


class Asked(NamedTuple):
    """A chat about documents, and what is in a right answer to it; None: not known."""

    place: str
    messages: list[dict[str, Any]]
    documents: list[Any]
    answer: str | None


class Line(Object):
    """A line of a file of chats; messages and documents are those of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    documents: list[Any]
    answer: str | None = None


def read_asked(path: Path) -> list[Asked]:
    """The chats of a JSONL file.

    Raises:
        ConfigError: there is none.
        RequestError: with the line, if one is something else, or has nothing to repair.
    """
    found = []
    told = "chat: a line of it is {'messages': [...], 'documents': [...], 'answer': ...}"
    for place, line in read_lines(path, Line, told):
        if len(line.documents) < 2:
            raise RequestError(
                f"{place}: documents are {len(line.documents)}, expected 2 at least: the first "
                "one is never repaired"
            )
        found.append(Asked(place, line.messages, line.documents, line.answer))
    return found


def written(count: int) -> Iterator[Asked]:
    """Chats that ask what is true of a person: eight about each three documents, in any order."""
    for number in range(count):
        draw = random.Random(f"persons {number // 8}")
        ends, documents = {}, []
        for name in draw.sample(NAMES, 3):
            told = [f"Room {i} of the house has a {draw.choice(THINGS)}." for i in range(ROOMS)]
            for begin, (_, words) in FACTS.items():
                ends[name, begin] = draw.choice(words.split())
                told.append(f"{begin.format(name)} {ends[name, begin]}.")
            draw.shuffle(told)
            documents.append({"title": name, "text": " ".join(told)})
        draw = random.Random(number)
        draw.shuffle(documents)
        name, begin = draw.choice([*ends])
        text = f"{FACTS[begin][0].format(name)} Answer in a few words."
        messages = [{"role": "user", "content": text}]
        yield Asked(f"written {number}", messages, documents, ends[name, begin])


def ask_all(
    llm: LLM, asked: Sequence[Asked], shares: Sequence[float], max_tokens: int
) -> list[dict[str, Any]]:
    """Facts of each chat, for JSON, as those of `pml_questions.ask_all`: of it whole, and of each
    share; and `logprobs`: how much more probable the whole prompt's tokens are with a share, in
    nats per token. Tokens are compared up to the first other one; where that has too small a
    probability to be listed, it counts as the least of those that are.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=TOP)
    facts: list[dict[str, Any]] = [
        {"prompt": one.place, "answer": one.answer, "texts": {}, "computed_tokens": {},
         "logprobs": {}}
        for one in asked
    ]  # fmt: skip
    messages, documents = [one.messages for one in asked], [one.documents for one in asked]
    whole: list[Completion] = []
    for share in (1.0, *sorted(shares)):
        name = WHOLE if share == 1 else f"repair {share:g}"
        llm.reset_prefix_cache()
        answers = llm.chat(messages, params, documents=documents, repair=share)
        outputs = [answer.outputs[0] for answer in answers]
        whole = whole or outputs
        for one, answer, output, first in zip(facts, answers, outputs, whole, strict=True):
            check_answered(answer, one["prompt"])
            one["texts"][name] = output.text
            one["computed_tokens"][name] = answer.metrics.num_computed_tokens
            one["logprobs"][name] = _gain(output, first)
    return [marked(one) for one in facts]


def _gain(output: Completion, whole: Completion) -> float:
    """How much more probable the tokens of `whole` are in `output`, per token."""
    total, count = 0.0, 0
    assert output.logprobs is not None
    assert whole.logprobs is not None
    for token, mine, its in zip(whole.token_ids, output.logprobs, whole.logprobs, strict=False):
        found = mine.get(token)
        least = min(one.logprob for one in mine.values())
        total += (least if found is None else found.logprob) - its[token].logprob
        count += 1
        if output.token_ids[count - 1] != token:
            break
    return total / max(count, 1)

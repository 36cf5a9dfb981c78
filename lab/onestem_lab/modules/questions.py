"""Documents that a script writes, and questions that one or two of them answer.

Everything is drawn from a number, so the same number gives the same text. A document is about one
person: facts, numbers and what was done in which order, between sentences that answer nothing, from
about 200 to 1,000 tokens. A question has the words that a right answer holds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

SYSTEM = "Answer the question about the documents in a few words."
NAMES = (
    "Marie", "John", "Ahmed", "Yuki", "Olga", "Pedro", "Fatima", "Lars", "Chen", "Amara",
    "Nina", "Tom", "Ravi", "Elena", "Kofi", "Sara", "Anna", "Paul", "Omar", "Hana", "Ivan",
    "Rosa", "Leila", "Nils", "Ling", "Zola", "Eva", "Sam", "Arjun", "Sofia", "Kwame", "Julia",
)  # fmt: skip
FACTS = {
    "city": ("{name} lives in", "In which city does {name} live?"),
    "job": ("{name} works as a", "What is the job of {name}?"),
    "pet": ("{name} has a pet, a", "Which animal is the pet of {name}?"),
    "food": ("The favourite food of {name} is", "What is the favourite food of {name}?"),
    "colour": ("The colour of the car of {name} is", "Which colour is the car of {name}?"),
    "month": ("The birthday of {name} is in", "In which month is the birthday of {name}?"),
}
NUMBERS = {
    "age": ("The age of {name} is", "What is the age of {name}?"),
    "house": ("The house number of {name} is", "What is the house number of {name}?"),
    "books": ("The number of books that {name} owns is", "How many books does {name} own?"),
}
ORDER = {
    "first": ("First {name} bought a", "What did {name} buy first?"),
    "then": ("Then {name} sold a", "What did {name} sell then?"),
    "last": ("At last {name} found a", "What did {name} find at last?"),
}
TOLD = {"fact": FACTS, "number": NUMBERS, "order": ORDER}
THINGS = "lamp chair table clock mirror carpet bicycle guitar camera radio kettle ladder umbrella"
VALUES = {
    "city": "Lyon Boston Cairo Osaka Moscow Lima Rabat Oslo Beijing Lagos Berlin Delhi",
    "job": "baker teacher doctor engineer farmer painter pilot nurse tailor sailor",
    "pet": "dog cat parrot rabbit turtle hamster goat horse",
    "food": "rice bread soup cheese honey pasta salad fish",
    "colour": "red blue green black white yellow silver brown",
    "month": "January February March April May June July August September October",
}
WHEN = (
    "On most evenings", "At the weekend", "When it rains", "Years ago", "In early summer",
    "Before noon", "After a long week", "Every now and then", "On holidays", "In a cold winter",
)  # fmt: skip
WHAT = (
    "the road along the river is quiet", "the old bridge is closed", "the market opens late",
    "the small garden is full of leaves", "the radio tower is hidden by clouds",
    "the library is open", "the harbour smells of tar", "the square is empty",
    "the museum has few visitors", "the train to the coast is crowded",
)  # fmt: skip
WHY = (
    "and nobody is surprised.", "which lasts about an hour.", "and the shops close early.",
    "as the whole street knows.", "because of the wind.", "and the lights stay on.",
    "until the bells ring.", "and the buses run slowly.",
)  # fmt: skip
SENTENCE = 17  # tokens of a sentence that answers nothing, about
FACTS_TOKENS = 130  # of the sentences that answer something, about
KINDS = ("fact", "number", "order", "two documents")


class Document(NamedTuple):
    """A text with its title; `facts` are what can be asked for."""

    title: str
    text: str
    facts: dict[str, str]


class Question(NamedTuple):
    """A prompt: its documents in their order, and the words that a right answer holds. The
    assistant's turn begins with `start`, which a weak model needs."""

    documents: tuple[Document, ...]
    text: str
    start: str
    right: tuple[str, ...]
    kind: str

    def judge(self, answer: str) -> bool:
        return all(word.lower() in answer.lower() for word in self.right)


def document(draw: random.Random, name: str, tokens: int) -> Document:
    facts = {kind: draw.choice(values.split()) for kind, values in VALUES.items()}
    facts |= {kind: str(draw.randint(11, 99)) for kind in NUMBERS}
    facts |= zip(ORDER, draw.sample(THINGS.split(), len(ORDER)))
    starts = {kind: start for group in TOLD.values() for kind, (start, _) in group.items()}
    told = [f"{starts[kind].format(name=name)} {value}." for kind, value in facts.items()]
    others = [f"{when} {what} {why}" for when in WHEN for what in WHAT for why in WHY]
    told += draw.sample(others, max((tokens - FACTS_TOKENS) // SENTENCE, 0))
    draw.shuffle(told)
    return Document(name, " ".join(told), facts)


def ask(draw: random.Random, chosen: tuple[Document, ...], kind: str) -> Question:
    """One about one of `chosen`, or about two: what the first has, and then the second."""
    one, other = draw.sample(chosen, 2)
    group = TOLD.get(kind, FACTS)
    fact = draw.choice(sorted(group))
    start, text = (part.format(name=one.title) for part in group[fact])
    if kind in TOLD:
        return Question(chosen, text, start, (one.facts[fact],), kind)
    second, also = (part.format(name=other.title) for part in group[fact])
    return Question(
        chosen, f"{text} {also}", f"{start} {one.facts[fact]}. {second}", (other.facts[fact],), kind
    )


def questions(
    prompts: range, asked: int = 8, documents: int = 3, tokens: tuple[int, int] = (200, 1000)
) -> Iterator[Question]:
    """`asked` questions about each of `prompts` choices of documents, kinds in turn."""
    for number in prompts:
        draw = random.Random(f"modules {number}")
        chosen = tuple(
            document(draw, name, draw.randint(*tokens)) for name in draw.sample(NAMES, documents)
        )
        for at in range(asked):
            yield ask(draw, chosen, KINDS[at % len(KINDS)])

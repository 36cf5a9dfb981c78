"""Questions about facts in a long document (Hydragen, section 4.3, appendix E.3)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from onestem.engine.text.tokenizer import Tokenizer
from onestem_lab.load.workload import WORDS

__all__ = ["Asked", "Needles", "is_right"]

COLORS = ("black", "white", "brown", "grey", "red", "golden", "silver", "blue", "green", "orange")
ONSETS, VOWELS, CODAS = "bdfgklmnprstvz", "aeiou", "dkmnrst"
SENTENCE_WORDS = (6, 16)


@dataclass(frozen=True)
class Asked:
    """Prompts behind one prefix.

    Attributes:
        prefix: tokens that all prompts begin with.
        right: each prompt's answer; empty: there are none to check.
    """

    prompts: list[list[int]]
    prefix: int
    right: Sequence[str] = ()


@dataclass(frozen=True)
class Needles:
    """A document of facts between sentences that state nothing; then some questions with answers,
    then one of the questions that are asked.

    Attributes:
        fact, question: texts with {name}; the fact has {color} too.
        facts: how many are asked. More questions than that repeat them.
        shots: further facts, whose questions come with their answers.
    """

    fact: str = "The dog named {name} has fur that is {color}."
    question: str = "What color is the fur of the dog named {name}?"
    facts: int = 256
    shots: int = 5

    def asked(self, tokenizer: Tokenizer, batch: int, prefix: int, facts: int) -> Asked:
        """`batch` questions on `facts` facts in about `prefix` tokens; more where the facts take
        more."""
        rng = random.Random(0)
        told = self._facts(rng, facts + self.shots)
        shown = list(told.items())[facts:]
        turns = "".join(f"{self._turn(name)} {color}\n" for name, color in shown)
        sentences = [self.fact.format(name=name, color=color) for name, color in told.items()]
        left = prefix - len(tokenizer.encode(f"{' '.join(sentences)}\n{turns}"))
        between: list[list[str]] = [[] for _ in sentences]
        while left > 0:
            for one in between:
                one.append(_sentence(rng))
                left -= len(tokenizer.encode(one[-1], add_special_tokens=False))
                if left <= 0:
                    break
        document = " ".join(
            " ".join([sentence, *others]) for sentence, others in zip(sentences, between)
        )
        head = tokenizer.encode(f"{document}\n{turns}")
        asked = (list(told.items())[:facts] * -(-batch // facts))[:batch]
        prompts = [
            head + tokenizer.encode(self._turn(name), add_special_tokens=False) for name, _ in asked
        ]
        return Asked(prompts, len(head), [color for _, color in asked])

    def _facts(self, rng: random.Random, count: int) -> dict[str, str]:
        """Name -> color."""
        told: dict[str, str] = {}
        while len(told) < count:
            syllables = (rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(2))
            name = "".join(syllables).capitalize() + rng.choice(CODAS)
            told[name] = rng.choice(COLORS)
        return told

    def _turn(self, name: str) -> str:
        return f"Question: {self.question.format(name=name)}\nAnswer:"


def is_right(tokenizer: Tokenizer, answer: Sequence[int], color: str) -> bool:
    """Whether the first line of an answer names this color and no other."""
    ids = list(takewhile(lambda token: token != tokenizer.eos_token_id, answer))
    line = tokenizer.decode(ids).strip().partition("\n")[0].lower()
    return {one for one in COLORS if one in line} == {color}


def _sentence(rng: random.Random) -> str:
    words = rng.choices(WORDS, k=rng.randint(*SENTENCE_WORDS))
    return f"{' '.join(words).capitalize()}."

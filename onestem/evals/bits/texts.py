"""Prompts over shared beginnings, made by rule: several languages, and code."""

from __future__ import annotations

import random

FAMILY = 4  # prompts with one beginning
SHARED = 0.75  # of a prompt

LANGUAGES = (
    ("The {a} stands {m} steps from the {b}, says page {n}. ", "bridge library mill tower"),
    ("Das {a} liegt {m} Schritte vom {b}, sagt Seite {n}. ", "Rathaus Museum Theater Tor"),
    ("第{n}条：{a}离{b}有{m}步远。", "桥 图书馆 磨坊 塔"),
    ("На странице {n} слова {a} и {b} стоят через {m}. ", "мост сад вокзал школа"),
    ("def f{n}(x, y={m}):\n    return {a}(x, {n}) - {b}(y, 2)\n\n", "max min pow divmod"),
)


def texts(count: int, characters: int) -> list[tuple[str, str]]:
    """(shared beginning, own end) of each of `count` prompts, each of `characters` at least."""
    return [
        (_text(i // FAMILY, f"family {i // FAMILY}", characters),
         _text(i // FAMILY, f"prompt {i}", characters))
        for i in range(count)
    ]  # fmt: skip


def _text(language: int, seed: str, characters: int) -> str:
    rng = random.Random(seed)
    sentence, nouns = LANGUAGES[language % len(LANGUAGES)]
    text = ""
    while len(text) < characters:
        a, b = rng.sample(nouns.split(), 2)
        text += sentence.format(n=rng.randrange(1, 1000), m=rng.randrange(2, 100), a=a, b=b)
    return text

"""Questions over texts that Python itself carries: how a sentence of its help topics goes on.

The texts are those of the Python that runs, so figures of two versions are not comparable.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pydoc_data.topics import topics

from onestem_lab.modules.questions import Document, Question

LETTERS = range(1_000, 4_000)  # of a text: about 250 to 1,000 tokens
WORDS = range(10, 30)  # of a sentence that can be asked for
ASKED_WORDS = 2  # that a right answer begins with


def texts() -> list[Document]:
    found = []
    for name in sorted(topics):
        text = re.sub(r"\s+", " ", topics[name]).strip()
        if len(text) >= LETTERS.start:
            found.append(Document(f"Python: {name}", text[: LETTERS.stop], {}))
    return found


def sentences(text: str) -> list[list[str]]:
    """Words of the sentences that are plain text, occur once, and have not too many words."""
    found = [one.split() for one in re.split(r"(?<=[.]) ", text)]
    return [
        words
        for words in found
        if len(words) in WORDS
        and re.fullmatch(r"[A-Z][A-Za-z,' -]+[.]", " ".join(words))
        and text.count(" ".join(words[: len(words) // 2])) == 1
    ]


def questions(prompts: range, asked: int = 8, documents: int = 3) -> Iterator[Question]:
    """`asked` questions about each of `prompts` choices of `documents`."""
    library = [one for one in texts() if len(sentences(one.text)) >= 3]
    for number in prompts:
        draw = random.Random(f"real {number}")
        chosen = tuple(draw.sample(library, documents))
        for _ in range(asked):
            words = draw.choice(sentences(draw.choice(chosen).text))
            half = len(words) // 2
            right = " ".join(words[half : half + ASKED_WORDS]).strip(",.")
            start = " ".join(words[:half])
            yield Question(chosen, f"How does this go on: {start}", start, (right,), "real")

"""The pieces of texts, found by what a job's prompts have in common: labels at the beginning of
lines (`Question: ...`), and sentences that differ only in numbers (`Today is 2026-11-23.`)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from onestem.batch.pieces import NAMELESS, Message, Piece, numbered

BREAK = re.compile(r"\n+|(?<=[.!?])[ \t]+")
LABEL = re.compile(r"[^\w\n]{0,3}([A-Za-z][\w ()/-]{0,30}):")
NUMBERED = re.compile(r"\S*\d\S*")
MOST_CHARACTERS = 200  # of a sentence that differs only in numbers
LEAST_SHARE = 20  # labels and sentences count if one prompt in LEAST_SHARE has them
NAME_CHARACTERS = 60


class TextPieces:
    """Finds the pieces of texts.

    Args:
        sample: prompts of the job, to learn what its texts have in common.
    """

    def __init__(self, sample: Iterable[Sequence[tuple[str | None, str]]]) -> None:
        labels: Counter[str] = Counter()
        masked: Counter[str] = Counter()
        forms: defaultdict[str, set[str]] = defaultdict(set)
        num_prompts = 0
        for parts in sample:
            num_prompts += 1
            chunks = [chunk for _, text in parts for chunk in _chunks(text)]
            labels.update({label for text, _, begins in chunks if (label := _label(text, begins))})
            sentences = {text: _masked(text) for text, _, _ in chunks}
            masked.update({form for form in sentences.values() if form})
            for text, form in sentences.items():
                if form and len(forms[form]) < 2:
                    forms[form].add(text)
        least = max(2, num_prompts / LEAST_SHARE)
        self._labels = {label for label, count in labels.items() if count >= least}
        self._masked = {
            form for form, count in masked.items() if count >= least and len(forms[form]) > 1
        }

    def of(self, parts: Sequence[tuple[str | None, str]]) -> list[Message]:
        """Pieces of each message; joined, they give its text."""
        names: Counter[str] = Counter()
        return [Message(role, [*self._pieces(text, names)]) for role, text in parts]

    def _pieces(self, text: str, names: Counter[str]) -> Iterator[Piece]:
        name, own, gap, closed = "", "", "", True
        for chunk, after, begins in _chunks(text):
            form = _masked(chunk)
            label = _label(chunk, begins)
            alone = form in self._masked
            if label not in self._labels:
                label = None
            if own and (closed or alone or label):
                yield Piece(numbered(name, names), own, gap)
                own = gap = ""
            own, gap = own + gap + chunk, after
            if own == chunk:
                name = label or (form[:NAME_CHARACTERS] if alone and form else NAMELESS)
            closed = alone
        if own or gap:
            yield Piece(numbered(name, names), own, gap)


def _chunks(text: str) -> Iterator[tuple[str, str, bool]]:
    """Sentences and lines: (text, white space after it, whether it begins a line)."""
    start, begins = 0, True
    for found in BREAK.finditer(text):
        yield text[start : found.start()], found.group(), begins
        start, begins = found.end(), "\n" in found.group()
    if start < len(text):
        yield text[start:], "", begins


def _label(text: str, begins: bool) -> str | None:
    found = LABEL.match(text) if begins else None
    return found.group(1) if found else None


def _masked(text: str) -> str | None:
    """A sentence with # for its numbers; None: it has none, or is long."""
    if len(text) > MOST_CHARACTERS or not any(map(str.isdigit, text)):
        return None
    return NUMBERED.sub("#", text)

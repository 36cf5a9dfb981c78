"""A prompt in pieces that could have another order: of a template, or found in its text.

A piece is a field with its label (`Question: {question}`), or text between fields. A template shows
its pieces. In a text they are found by what the job's prompts have in common: labels at the
beginning of lines (`Question: ...`), and sentences that differ only in numbers (`Today is
2026-11-23.`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from onestem.batch.templates import Field, Recipe, Template
from onestem.openai.read import Prompt

__all__ = [
    "NAMELESS",
    "Message",
    "Piece",
    "TextPieces",
    "joined",
    "parts_of",
    "rendered",
    "sources",
    "template_pieces",
]

ROLE, TEXT = "role", "content"
NAMELESS = ""
"""Name of a piece that has no field and no label."""

BREAK = re.compile(r"\n+|(?<=[.!?])[ \t]+")
LABEL = re.compile(r"[^\w\n]{0,3}([A-Za-z][\w ()/-]{0,30}):")
CLOSING = re.compile(r"\s*</[^<>\n]*>")
LINE_END, SPACE = re.compile(r"\s*\n\s*"), re.compile(r"\s+")
NUMBERED = re.compile(r"\S*\d\S*")
MOST_CHARACTERS = 200  # of a sentence that differs only in numbers
LEAST_SHARE = 20  # labels and sentences count if one prompt in LEAST_SHARE has them
NAME_CHARACTERS = 60


class Piece(NamedTuple):
    """A part of a message.

    Attributes:
        name: for people; equal names are the same piece of two prompts.
        text: without the gap.
        gap: white space after it, which stays in its place.
    """

    name: str
    text: str
    gap: str


class Message(NamedTuple):
    """Pieces of a message, or of a plain text prompt (role None)."""

    role: str | None
    pieces: Sequence[Piece]


def parts_of(prompt: Prompt) -> list[tuple[str | None, str]] | None:
    """Role and text of each message; None: the prompt is token ids or PML."""
    if prompt.raw is not None:
        return [(None, prompt.raw.text)]
    if prompt.messages is None:
        return None
    return [(message[ROLE], message[TEXT]) for message in prompt.messages]


# ------------------------------------------------------------------------------------- reordered


def joined(messages: Sequence[Message], order: Sequence[int]) -> list[str]:
    """Texts of the messages with their pieces in another order.

    Args:
        order: pieces, numbered through all messages. A piece that is to follow one of a later
            message moves to the first user's message from that one on, if there is one.
    """
    flat = [(place, piece) for place, one in enumerate(messages) for piece in one.pieces]
    users = [i for i, message in enumerate(messages) if message.role in (None, "user")]
    groups: list[list[int]] = [[] for _ in messages]
    reached = 0
    for number in order:
        own = flat[number][0]
        reached = max(reached, own)
        home = next((user for user in users if user >= reached), own) if own < reached else own
        groups[home].append(number)
    return [
        _text(group, flat) + (message.pieces[-1].gap if message.pieces else "")
        for group, message in zip(groups, messages, strict=True)
    ]


def _text(group: Sequence[int], flat: Sequence[tuple[int, Piece]]) -> str:
    """The pieces of a message as text. Neighbours stay as far apart as they were; other pieces get
    the wider of the gaps that they had, at least a new line."""
    text = ""
    for number, following in pairwise(group):
        piece = flat[number][1]
        is_first = not following or flat[following - 1][0] != flat[following][0]
        before = "" if is_first else flat[following - 1][1].gap
        are_neighbours = following == number + 1 and not is_first
        gap = piece.gap if are_neighbours else max(piece.gap, before, "\n", key=_width)
        text += piece.text + gap
    return text + (flat[group[-1]][1].text if group else "")


def _width(gap: str) -> tuple[int, int]:
    return gap.count("\n"), len(gap)


# ------------------------------------------------------------------------------------- templates


def template_pieces(recipe: Recipe) -> Sequence[tuple[str | None, Sequence[Any]]] | None:
    """(role, (name, template, gap) of each piece) of each message of a template; None: these depend
    on the row."""
    prompt = recipe.fields.get("prompt", recipe.fields.get("messages"))
    if isinstance(prompt, Template):
        role = None if recipe.kind == "completion" else "user"
        return [(role, _split(prompt))] if len(prompt.parts) > 1 else None
    messages = []
    for message in prompt if isinstance(prompt, list) else [None]:
        if not isinstance(message, dict) or message.keys() != {ROLE, TEXT}:
            return None
        role, text = message[ROLE], message[TEXT]
        if not isinstance(role, Template) or role.columns or not isinstance(text, Template):
            return None
        messages.append((role.value({}), _split(text)))
    return messages


def _split(template: Template) -> list[tuple[str, Template, str]]:
    """The pieces of a template's text: each field with its label before it and the rest of its
    line."""
    parts = [*template.parts]
    fields = [i for i, part in enumerate(parts) if isinstance(part, Field)]
    if not fields:
        return [(NAMELESS, template, "")]
    pieces: list[tuple[str, Template, str]] = []
    label = _lead(parts[0] if fields[0] else "", pieces)
    for i, place in enumerate(fields):
        field, following = parts[place], ""
        if place + 1 < len(parts) and isinstance(parts[place + 1], str):
            following = str(parts[place + 1])
        assert isinstance(field, Field)
        own = closing.end() if (closing := CLOSING.match(following)) else 0
        ends = LINE_END.search(following, own) or SPACE.search(following, own)
        end, gap, rest = following, "", ""
        if ends is not None:
            end, gap, rest = following[: ends.start()], ends.group(), following[ends.end() :]
        pieces.append((field.column, Template([part for part in (label, field, end) if part]), gap))
        label = _lead(rest, pieces) if i + 1 < len(fields) else ""
    if rest:
        pieces.append((NAMELESS, Template([rest]), ""))
    return pieces


def _lead(literal: str | Field, pieces: list[tuple[str, Template, str]]) -> str:
    """The label at the end of a literal; the text before it becomes a piece of its own."""
    assert isinstance(literal, str)
    cut = literal.rstrip("\n").rfind("\n")
    text = literal[: max(cut, 0)].rstrip("\n")
    if not text:
        return literal
    label = literal[cut + 1 :]
    pieces.append((NAMELESS, Template([text]), literal[len(text) : cut + 1]))
    return label


# ------------------------------------------------------------------------------------- texts


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
                yield Piece(_numbered(name, names), own, gap)
                own = gap = ""
            own, gap = own + gap + chunk, after
            if own == chunk:
                name = label or (form[:NAME_CHARACTERS] if alone and form else NAMELESS)
            closed = alone
        if own or gap:
            yield Piece(_numbered(name, names), own, gap)


def _numbered(name: str, names: Counter[str]) -> str:
    names[name] += 1
    return name if names[name] == 1 else f"{name} ({names[name]})"


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


def rendered(
    slots: Sequence[tuple[str | None, Sequence[Any]]], row: Mapping[str, Any]
) -> list[Message]:
    """The pieces of a row's prompt; raises `LineError`."""
    names: Counter[str] = Counter()
    return [
        Message(
            role,
            [
                Piece(_numbered(name, names), _as_text(template, row), gap)
                for name, template, gap in pieces
            ],
        )
        for role, pieces in slots
    ]


def sources(slots: Sequence[tuple[str | None, Sequence[Any]]]) -> list[Message]:
    """The pieces of a template, in the syntax of templates."""
    return [
        Message(role, [Piece(name, template.source, gap) for name, template, gap in pieces])
        for role, pieces in slots
    ]


def _as_text(template: Template, row: Mapping[str, Any]) -> str:
    return Template(["", *template.parts]).value(row)

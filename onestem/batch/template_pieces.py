"""The pieces of a template, and of the prompts that it makes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onestem.batch.pieces import NAMELESS, ROLE, TEXT, Message, Piece, numbered
from onestem.batch.templates import Field, Recipe, Template

CLOSING = re.compile(r"\s*</[^<>\n]*>")
LINE_END, SPACE = re.compile(r"\s*\n\s*"), re.compile(r"\s+")


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


def rendered(
    slots: Sequence[tuple[str | None, Sequence[Any]]], row: Mapping[str, Any]
) -> list[Message]:
    """The pieces of a row's prompt; raises `LineError`."""
    return _messages(slots, lambda template: template.text(row))


def sources(slots: Sequence[tuple[str | None, Sequence[Any]]]) -> list[Message]:
    """The pieces of a template, in the syntax of templates."""
    return _messages(slots, lambda template: template.source)


def _messages(
    slots: Sequence[tuple[str | None, Sequence[Any]]], text: Callable[[Template], str]
) -> list[Message]:
    names: Counter[str] = Counter()
    return [
        Message(
            role,
            [Piece(numbered(name, names), text(template), gap) for name, template, gap in pieces],
        )
        for role, pieces in slots
    ]

"""A prompt in pieces that could have another order.

A piece is a field with its label (`Question: {question}`), or text between fields. A template shows
its pieces (`template_pieces`). In a text they are found by what the job's prompts have in common
(`text_pieces`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from onestem.openai.read import Prompt

ROLE, TEXT = "role", "content"
NAMELESS = ""
"""Name of a piece that has no field and no label."""


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


def numbered(name: str, names: Counter[str]) -> str:
    """A name that no earlier piece has: `name`, `name (2)`, ...; `names` counts them."""
    names[name] += 1
    return name if names[name] == 1 else f"{name} ({names[name]})"

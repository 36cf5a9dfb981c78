"""The text after a prompt's last import: its new turns, and what begins the answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from onestem.pml.layout import Layout, before_turns, separated
from onestem.pml.place import Place, PmlError
from onestem.pml.reading import NewText
from onestem.pml.tokens import Part, around_turns


def ending(
    layout: Layout, texts: Sequence[NewText], *, after_space: bool, at: Place | None
) -> list[Part]:
    """The text after the last import.

    Without roles in schema and prompt, it is the new text as it is. With roles, text outside of
    them is the user's. A first turn of the same role as the schema's last one continues that. Any
    other turn begins as in the chat template. At the end the template opens the assistant's turn;
    if the last turn is the assistant's, the answer continues it instead.

    Args:
        texts: those with `last`.
        after_space: whether no separator is needed before them.
        at: place of errors that no text causes.
    """
    if not layout.roles and not any(text.role for text in texts):
        return _content(layout, texts, after_space)
    turns = [(role, list(new)) for role, new in groupby(texts, lambda text: text.role or "user")]
    parts: list[Part] = []
    if turns and layout.roles and turns[0][0] == layout.roles[-1]:
        parts = _content(layout, turns.pop(0)[1], after_space)
    roles = [*layout.roles, *(role for role, _ in turns)]
    if not turns and roles[-1] == "assistant":
        return parts
    around = _around_new_turns(layout, roles, turns[0][1][0].node.at if turns else at)
    for before, (_, new) in zip(around, turns):
        parts += [Part(before, control=True), *_content(layout, new, after_space=True)]
    return parts if roles[-1] == "assistant" else [*parts, Part(around[-1], control=True)]


def _content(layout: Layout, new: Sequence[NewText], after_space: bool) -> list[Part]:
    """Consecutive texts, with the separator before them if one is needed."""
    if not new:
        return []
    separator = layout.schema.separator
    *texts, last = (text.node.text for text in new)
    first = [] if after_space or not separator else [Part(separator)]
    inner = [Part(separated(text, separator)) for text in texts]
    return [*first, *inner, Part(last)]


def _around_new_turns(layout: Layout, roles: Sequence[str], at: Place | None) -> list[str]:
    """The template's text before each turn that is not the schema's, and after the last."""
    answer = roles[-1] != "assistant"
    around = around_turns(layout.tokenizer, roles, answer=answer, at=at)
    known = len(layout.roles)
    # A template may write the date, so the schema's turns are rendered again before comparing.
    same = around[:known] == list(layout.around)
    if not same and around[:known] != before_turns(layout.tokenizer, layout.roles, at):
        raise PmlError(
            "the chat template writes the schema's turns in another way when others follow: end "
            "the schema with the user's turn, or leave roles out of the prompt",
            at,
        )
    return around[known:]

"""Text to token ids, and the text that a chat template puts around turns.

The template renders a conversation whose contents are marks. The text around the marks is what it
writes before, between and after the turns, whatever its rules are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from onestem.errors import RequestError
from onestem.pml.place import Place, PmlError


class Tokenizer(Protocol):
    """What PML needs of a tokenizer (`onestem.engine.text.tokenizer.Tokenizer` has it)."""

    @property
    def placeholder_token_id(self) -> int | None:
        """The unknown token's id, or the padding token's, or None."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Sequence[int]:
        """Ids of a text; names of control tokens in it count as characters."""

    def encode_control(self, text: str) -> Sequence[int]:
        """Ids of a text whose names of control tokens are control tokens. BOS, if the model has it,
        comes first, once."""

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = ...
    ) -> str:
        """A conversation as text, by the model's chat template."""


class Part(NamedTuple):
    """Some text. `control`: a chat template wrote it, so names of control tokens are tokens."""

    text: str
    control: bool = False


def encode_text(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """int32 `[n]`: ids of a text that follows other text."""
    return np.asarray(_encode(tokenizer, Part(text), []), dtype=np.int32)


def encode_parts(tokenizer: Tokenizer, parts: Sequence[Part], *, first: bool) -> np.ndarray:
    """int32 `[n]`: ids of consecutive parts.

    They are encoded together, as in a conversation rendered whole. But if a user's part names a
    control token, each part is encoded alone, so that the name stays text.

    Args:
        first: whether a sequence begins here, with BOS where the model has one.
    """
    begin = list(tokenizer.encode_control(""))
    whole = Part("".join(part.text for part in parts), any(part.control for part in parts))
    if whole.control and not all(_is_plain(tokenizer, part, begin) for part in parts):
        ids = [token for part in parts for token in _encode(tokenizer, part, begin)]
        ids = [*begin, *ids] if first else ids
    elif not first:
        ids = _encode(tokenizer, whole, begin)
    elif whole.control:
        ids = list(tokenizer.encode_control(whole.text))
    else:
        ids = [*begin, *_characters(tokenizer, whole.text)]
    return np.asarray(ids, dtype=np.int32)


def _encode(tokenizer: Tokenizer, part: Part, begin: list[int]) -> list[int]:
    """Ids of a part that follows other text, without BOS."""
    encode = tokenizer.encode_control if part.control else partial(_characters, tokenizer)
    ids = after_break(encode, part.text)
    return ids[len(begin) :] if part.control and ids[: len(begin)] == begin else ids


def after_break(encode: Callable[[str], Sequence[int]], text: str) -> list[int]:
    """Ids of a text that follows another, whatever that is.

    Tokenizers like SentencePiece may add a space before a text that is alone. So it is encoded
    after a line break, or, where it merges with that, after a letter.
    """
    for mark in ("\n", "a"):
        before, joined = list(encode(mark)), list(encode(mark + text))
        if joined[: len(before)] == before:
            return joined[len(before) :]
    return list(encode(text))


def _characters(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _is_plain(tokenizer: Tokenizer, part: Part, begin: list[int]) -> bool:
    """Whether a part is a template's, or names no control token."""
    if part.control:
        return True
    ids = list(tokenizer.encode_control(part.text))
    return ids == [*begin, *_characters(tokenizer, part.text)]


def around_turns(
    tokenizer: Tokenizer, roles: Sequence[str], *, answer: bool, at: Place | None
) -> list[str]:
    """The chat template's text before each turn's content, and after the last.

    Args:
        roles: of the turns, in order.
        answer: whether the template then opens the assistant's turn.
        at: place of errors.

    Returns:
        one more text than there are roles.
    """
    marks = [f"pmlturn{index}x8f3a61d2" for index in range(len(roles))]
    messages = [{"role": r, "content": mark} for r, mark in zip(roles, marks, strict=True)]
    try:
        rendered = tokenizer.render_chat(messages, add_generation_prompt=answer)
    except RequestError as error:
        reason = " ".join(str(error).split())
        raise PmlError(f"turns {', '.join(roles)}: {reason}", at) from error
    texts, rest = [], rendered
    for role, mark in zip(roles, marks, strict=True):
        before, found, rest = rest.partition(mark)
        if not found or rendered.count(mark) != 1:
            raise PmlError(
                f"the chat template does not write the content of <{role}> once and in its place: "
                "leave this turn out",
                at,
            )
        texts.append(before)
    return [*texts, rest]

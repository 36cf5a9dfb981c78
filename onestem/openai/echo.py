"""Prompts that precede their answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from onestem.openai.write import ResponseFormat
from onestem.request import CompletionOutput, TokenLogprobs
from onestem.utf8 import Places


def echoed(
    answer: CompletionOutput,
    prompt: str,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None] | None,
    *,
    alone: bool,
) -> CompletionOutput:
    """An answer with its prompt before it; `alone`: the prompt in place of it."""
    if alone:
        answer = replace(answer, text="", token_ids=[], logprobs=[], finish_reason="length")
    entries: list[Any] | None = None
    if logprobs is not None:
        entries = [*logprobs, *(answer.logprobs or ())]
    return replace(
        answer,
        text=prompt + answer.text,
        token_ids=[*token_ids, *answer.token_ids],
        logprobs=entries,
    )


def form_of_echo(
    form: ResponseFormat, text: str, token_ids: Sequence[int], *, spells_control: bool
) -> ResponseFormat:
    """The form of an answer that follows its prompt.

    Args:
        text: of the prompt.
        spells_control: whether names of control tokens in it are these tokens.
    """
    offsets: Sequence[int] = ()
    if form.token_bytes is not None and form.logprobs is not None:
        offsets = [*_offsets(form, text, token_ids, spells_control)]
    return replace(form, echo_offsets=offsets, echoed_characters=len(text))


def _offsets(
    form: ResponseFormat, text: str, token_ids: Sequence[int], spells_control: bool
) -> Iterator[int]:
    """Where a prompt's tokens begin in its text.

    Bytes of the tokens between two control tokens that are spelled in the text may differ from what
    is there: by a space that the tokenizer puts before, or by blanks that are part of a control
    token. So each such part is counted by itself.
    """
    assert form.token_bytes is not None
    start = 0
    part: list[int] = []  # tokens since then
    for token in token_ids:
        found = -1
        if spells_control and token in form.special_ids:
            name = form.token_bytes(token).decode(errors="replace")
            found = text.find(name, start)
        has_text = any(other not in form.special_ids for other in part)
        if found < 0 or (text[start:found].strip() and not has_text):
            part.append(token)  # the tokenizer has added it
            continue
        yield from _part_offsets(form, text, start, found, part)
        yield found
        start, part = found + len(name), []
    yield from _part_offsets(form, text, start, len(text), part)


def _part_offsets(
    form: ResponseFormat, text: str, start: int, end: int, part: Sequence[int]
) -> Iterator[int]:
    """Where the tokens of `text[start:end]` begin; control tokens among them are not in it."""
    assert form.token_bytes is not None
    pieces = [b"" if token in form.special_ids else form.token_bytes(token) for token in part]
    at = _found(text, start, end, pieces)
    first = next((place for place, piece in enumerate(pieces) if piece), None)
    if at is None and first is not None and form.first_token_bytes is not None:
        pieces[first] = form.first_token_bytes(part[first])
        at = _found(text, start, end, pieces)
    yield from map(Places(start if at is None else at).next, pieces)


def _found(text: str, start: int, end: int, pieces: Sequence[bytes]) -> int | None:
    """Where pieces are in a text, with nothing but blanks before them; None: nowhere."""
    at = text.find(b"".join(pieces).decode(errors="replace"), start, end)
    return at if at >= 0 and not text[start:at].strip() else None

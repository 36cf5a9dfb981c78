"""A tokenizer whose tokens are characters: positions can be counted by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from onestem.errors import RequestError

BOS, END, SYSTEM, USER, ASSISTANT, UNKNOWN = range(1, 7)
CONTROL = {
    "<bos>": BOS,
    "<end>": END,
    "<system>": SYSTEM,
    "<user>": USER,
    "<assistant>": ASSISTANT,
}
_CONTROL_NAME = re.compile("|".join(CONTROL))


class Characters:
    """Ids of characters are their code points. Turns are `<role>content<end>`, BOS before all."""

    def __init__(self, placeholder: int | None = UNKNOWN, begin: Sequence[int] = (BOS,)) -> None:
        self.placeholder_token_id = placeholder
        self.begin = list(begin)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(character) for character in text]
        return [*self.begin, *ids] if add_special_tokens else ids

    def encode_control(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        for found in _CONTROL_NAME.finditer(text):
            ids += [*map(ord, text[at : found.start()]), CONTROL[found.group()]]
            at = found.end()
        ids += map(ord, text[at:])
        return ids if ids[: len(self.begin)] == self.begin else [*self.begin, *ids]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        turns = "".join(f"<{m['role']}>{m['content']}<end>" for m in messages)
        return f"<bos>{turns}{'<assistant>' if add_generation_prompt else ''}"


class NoTemplate(Characters):
    """A tokenizer of a base model."""

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        raise RequestError("the model's tokenizer has no chat template")


def text_of(ids: Sequence[int]) -> str:
    """The ids, readable: control tokens by name."""
    names = {token: name for name, token in CONTROL.items()} | {UNKNOWN: "?"}
    return "".join(names.get(int(token), chr(int(token))) for token in ids)

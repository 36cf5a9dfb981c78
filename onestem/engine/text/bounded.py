"""Refuse texts that are certainly too long by their characters, before they are tokenised.
Tokenising takes seconds for megabytes, and as long for what is refused as for what is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onestem.engine.text.tokenizer import ChatIds, Tokenizer
from onestem.errors import RequestError
from onestem.openai.forms import HoldSchema, Reading
from onestem.rawtext import RawText

if TYPE_CHECKING:
    from onestem.openai.read import Asked, Prompt

TAG = re.compile(r"<[^>]*>")
MOST_ELEMENTS = 4096  # of a PML text: each costs about 0.1 ms to read, to lay out and to compile


class BoundedTokenizer:
    """A tokenizer of prompts, which refuses what cannot have at most `max_model_len` tokens (None:
    nothing).

    It is also the tokenizer of a job (`onestem.batch.spool`).
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int | None) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def check(
        self,
        name: str,
        num_characters: int,
        max_tokens: int | None = None,
        *,
        control: bool = False,
    ) -> None:
        """Raise `RequestError` for a text that certainly has more than `max_tokens` tokens (None:
        than the model's length)."""
        max_tokens = self._max_model_len if max_tokens is None else max_tokens
        self._tokenizer.check_length(name, num_characters, max_tokens, control=control)

    def check_messages(self, name: str, messages: Iterable[Mapping[str, Any]]) -> None:
        """The same of all texts of checked messages together."""
        self.check(name, sum(map(len, _texts(messages))), control=True)

    def encode_batch(
        self, texts: Sequence[RawText], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Ids of raw texts, as of `Tokenizer.encode_batch`."""
        for raw in texts:
            self._tokenizer.check_raw(raw, self._max_model_len)
        return self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **how: Any
    ) -> ChatIds:
        """A conversation, as of `Tokenizer.chat`, whose other arguments it takes."""
        self.check_messages("messages", messages)
        named = {"tools": "fields", "documents": "documents", "lead_in": "lead_in"}
        for name, given in ((name, how.get(field)) for name, field in named.items()):
            if given:
                self.check(name, len(_json(given)), control=True)
        return self._tokenizer.chat(
            messages, add_generation_prompt, max_tokens=self._max_model_len, **how
        )

    def around(self, prompt: Prompt, ids: Sequence[int]) -> dict[str, int]:
        """Fields of a `Request` for a chat: what its template has written around messages."""
        if not prompt.messages:
            return {}
        written = self._tokenizer.written(prompt.template.fields)
        prefilled = written.prefilled if prompt.template.add_generation_prompt else 0
        first = prompt.messages[0]["role"]
        has_system = first in ("system", "developer") or bool(prompt.template.fields.get("tools"))
        system = written.first_message(ids) if has_system else 0
        return {"prefilled_tokens": prefilled, "system_tokens": system}

    @property
    def first_id(self) -> int | None:
        """What stands for a beginning; None: the tokenizer names nothing."""
        return self._tokenizer.first_id

    @property
    def special_ids(self) -> Collection[int]:
        """Ids of control tokens."""
        return self._tokenizer.special_ids

    def held(
        self, asked: Asked, hold_schema: HoldSchema, chat: Callable[[], ChatIds]
    ) -> tuple[Asked, ChatIds | None]:
        """A chat with tools in the model's form, as of `Asked.held`; and its ids, where `chat` had
        to make them for that."""
        made: ChatIds | None = None

        def opened() -> bool:
            nonlocal made
            made = chat()
            return self._tokenizer.is_reasoning(made.ids)

        form, token_of = self._tokenizer.tool_form, self._tokenizer.control_token
        return asked.held(form, token_of, hold_schema, opened=opened), made

    def reading(
        self,
        prompt: Sequence[int],
        texts: Mapping[str, Sequence[str]] | None,
        *,
        is_free: bool = True,
    ) -> Reading | None:
        """See `Tokenizer.reading`."""
        return self._tokenizer.reading(prompt, texts, is_free=is_free)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token that does not come first."""
        return self._tokenizer.token_bytes(token_id)


def _json(value: Any) -> str:
    """The shortest form: a template may write a longer one."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def _texts(messages: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for message in messages:
        if "tool_calls" in message:
            yield _json(message["tool_calls"])
        yield message["content"]


def check_markup(markup: str, tokenizer: BoundedTokenizer) -> None:
    """Raise `RequestError` for a PML text with too many elements, or a text between them that has
    too many tokens."""
    count = markup.count("<") - markup.count("</")
    if count > MOST_ELEMENTS:
        raise RequestError(
            f"pml has {count} elements, limit is {MOST_ELEMENTS}: make several schemas, or larger "
            "modules"
        )
    tokenizer.check("pml", max(map(len, TAG.split(markup))))

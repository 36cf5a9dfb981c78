"""An answer as blocks: its reasoning, texts and calls in the order in which the model wrote them.

Whole answers and streams are written from the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import Any, Literal

from onestem.openai.forms import AnswerReader, Reading
from onestem.openai.write import compact_json

MARK = "\0"


def named_event(value: Mapping[str, Any]) -> str:
    """One server-sent event, named by its type."""
    return f"event: {value['type']}\ndata: {compact_json(value)}\n\n"


class EventForms:
    """Events of a block that differ in a few values alone, as those of tokens do: what is around
    these is written once.

    Args:
        make: the event of a block with the text `MARK` in place of each such value.
    """

    def __init__(self, make: Callable[[Block], Mapping[str, Any]]) -> None:
        self._make = make
        self._block: Block | None = None
        self._around: list[str] = []

    def event(self, block: Block, *values: str) -> str:
        """The event with these values, which are JSON."""
        if block is not self._block:
            self._block = block
            self._around = named_event(self._make(block)).split(compact_json(MARK))
        first, *rest = self._around
        return first + "".join(map(add, values, rest))


Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A part of an answer.

    Attributes:
        index: its place in the answer.
        parts: of its text, as they came.
        name, call_id: of a call: its function, and its id.
    """

    kind: Kind
    index: int
    parts: list[str] = field(default_factory=list)
    name: str = ""
    call_id: str = ""

    @property
    def text(self) -> str:
        """What has come of it; of a call: its arguments."""
        return "".join(self.parts)


News = tuple[Literal["begin", "more", "end"], Block, str]  # with the text that is new


class Blocks:
    """Reads an answer's text as it comes.

    Args:
        reading: how it is read; None: it is text as it is.
        name: the answer's, which ids of its calls depend on.

    Attributes:
        blocks: those that have begun.
    """

    def __init__(self, reading: Reading | None, name: str) -> None:
        self.blocks: list[Block] = []
        self._reading, self._name = reading, name
        self._reader = None if reading is None else AnswerReader(reading)
        self._open: Block | None = None

    @property
    def has_called(self) -> bool:
        """Whether there are calls, and the last one's arguments have ended."""
        return self._reader is not None and self._reader.has_called

    def feed(self, text: str, *, ends: bool) -> list[News]:
        """Read more text; `ends`: the answer has no more."""
        news: list[News] = []
        reader = self._reader
        if self._reading is None or reader is None:
            self._add(news, "text", text)
        elif not ends and (mode := reader.plain(text)) is not None:
            self._add(news, "reasoning" if mode == "thought" else "text", text)
        else:
            form = self._reading.form
            for event in (*reader.feed(text), *(reader.finish() if ends else ())):
                if event.name:
                    own = event.id or form.call_id(self._name, 0, event.index)
                    self._begin(news, "call", event.name, own)
                self._add(news, "reasoning", event.reasoning)
                self._add(news, "call", event.arguments)
                self._add(news, "text", event.text)
        if ends:
            self._end(news)
        return news

    def _add(self, news: list[News], kind: Kind, text: str) -> None:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            self._begin(news, kind)
        assert self._open is not None
        self._open.parts.append(text)
        news.append(("more", self._open, text))

    def _begin(self, news: list[News], kind: Kind, name: str = "", call_id: str = "") -> None:
        self._end(news)
        self._open = Block(kind, len(self.blocks), name=name, call_id=call_id)
        self.blocks.append(self._open)
        news.append(("begin", self._open, ""))

    def _end(self, news: list[News]) -> None:
        if self._open is not None:
            news.append(("end", self._open, ""))
            self._open = None

"""An answer as blocks: its reasoning, texts and calls in the order in which the model wrote them.

Whole answers and streams are written from the same blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onestem.openai.tools import CallParser, ToolForm

__all__ = ["Block", "Blocks", "News", "named_event"]

# Characters above ASCII are escaped: no reader can take one for a line end.
_json = json.JSONEncoder(separators=(",", ":")).encode


def named_event(value: Mapping[str, Any]) -> str:
    """One server-sent event, named by its type."""
    return f"event: {value['type']}\ndata: {_json(value)}\n\n"


@dataclass(slots=True)
class Block:
    """A part of an answer.

    Attributes:
        index: its place in the answer.
        text: what has come of it; of a call: its arguments.
        name, number: of a call: its function, and its place among the calls.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    text: str = ""
    name: str = ""
    number: int = -1


News = tuple[Literal["begin", "more", "end"], Block, str]  # with the text that is new


class Blocks:
    """Reads an answer's text as it comes.

    Args:
        form: of its calls; None: it has none.

    Attributes:
        blocks: those that have begun.
    """

    def __init__(self, form: ToolForm | None) -> None:
        self.blocks: list[Block] = []
        self._parser = None if form is None else CallParser(form)
        self._open: Block | None = None

    @property
    def has_called(self) -> bool:
        """Whether there are calls, and the last one's arguments have ended."""
        return self._parser is not None and self._parser.has_called

    def feed(self, text: str, *, ends: bool) -> list[News]:
        """Read more text; `ends`: the answer has no more."""
        news: list[News] = []
        if self._parser is None:
            self._add(news, "text", text)
        else:
            found = self._parser.feed(text)
            if ends:
                found += self._parser.finish()
            for event in found:
                if event.name:
                    self._begin(news, "call", event.name, event.index)
                elif event.arguments:
                    self._add(news, "call", event.arguments)
                else:
                    self._add(news, "text", event.text)
        if ends:
            self._end(news)
        return news

    def _add(self, news: list[News], kind: Literal["text", "call"], text: str) -> None:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            self._begin(news, kind)
        assert self._open is not None
        self._open.text += text
        news.append(("more", self._open, text))

    def _begin(
        self, news: list[News], kind: Literal["text", "call"], name: str = "", number: int = -1
    ) -> None:
        self._end(news)
        self._open = Block(kind, len(self.blocks), name=name, number=number)
        self.blocks.append(self._open)
        news.append(("begin", self._open, ""))

    def _end(self, news: list[News]) -> None:
        if self._open is not None:
            news.append(("end", self._open, ""))
            self._open = None

"""An answer as blocks: its reasoning, texts and calls in the order in which the model wrote them.

Whole answers and streams are written from the same blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from onestem.openai.forms import AnswerReader, Reading
from onestem.openai.write import compact_json

MARK = "\0"


def named_event(value: Mapping[str, Any]) -> str:
    """One server-sent event, named by its type."""
    return f"event: {value['type']}\ndata: {compact_json(value)}\n\n"


def around_marks(value: Mapping[str, Any]) -> list[str]:
    """An event in the parts around each text of it that is `MARK`."""
    return named_event(value).split(compact_json(MARK))


Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A part of an answer.

    Attributes:
        index: its place in the answer.
        parts: of its text, as they came.
        name, call_id: of a call: its function, and its id.
        around: what is around the values of an event of more text.
    """

    kind: Kind
    index: int
    parts: list[str] = field(default_factory=list)
    name: str = ""
    call_id: str = ""
    around: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What has come of it; of a call: its arguments."""
        return "".join(self.parts)


class BlockWriter(ABC):
    """Reads an answer's text as it comes, and writes what is new in its blocks as events.

    Args:
        reading: how it is read; None: it is text as it is.
        name: the answer's, which ids of its calls depend on.
    """

    def __init__(self, reading: Reading | None, name: str) -> None:
        self._blocks: list[Block] = []  # that have begun
        self._reading, self._name = reading, name
        self._reader = None if reading is None else AnswerReader(reading)
        self._open: Block | None = None

    def token(self, token_id: int, text: str) -> bytes:
        """The events for one further token."""
        return self._feed(text).encode()

    @abstractmethod
    def _begun(self, block: Block) -> str:
        """The events of a block that begins, which gets its `around`."""

    @abstractmethod
    def _more(self, block: Block, text: str) -> str:
        """The event of more text."""

    @abstractmethod
    def _ended(self, block: Block) -> str:
        """The events of a block's end."""

    @property
    def _has_called(self) -> bool:
        """Whether there are calls, and the last one's arguments have ended."""
        return self._reader is not None and self._reader.has_called

    def _feed(self, text: str, *, ends: bool = False) -> str:
        """The events of more text; `ends`: the answer has no more."""
        reader, written = self._reader, ""
        if self._reading is None or reader is None:
            written = self._add("text", text)
        elif not ends and (told := reader.plain(text)) is not None:
            return self._add("reasoning" if reader.mode == "thought" else "text", told)
        else:
            form = self._reading.form
            for event in (*reader.feed(text), *(reader.finish() if ends else ())):
                if event.name:
                    own = event.id or form.call_id(self._name, 0, event.index)
                    written += self._begin("call", event.name, own)
                written += self._add("reasoning", event.reasoning)
                written += self._add("call", event.arguments)
                written += self._add("text", event.text)
        return written + self._end() if ends else written

    def _add(self, kind: Kind, text: str) -> str:
        if not text:
            return ""
        block, begun = self._open, ""
        if block is None or block.kind != kind:
            begun, block = self._begin(kind), self._blocks[-1]
        block.parts.append(text)
        return begun + self._more(block, text)

    def _begin(self, kind: Kind, name: str = "", call_id: str = "") -> str:
        before = self._open
        self._open = Block(kind, len(self._blocks), name=name, call_id=call_id)
        self._blocks.append(self._open)
        ended = "" if before is None else self._ended(before)
        return ended + self._begun(self._open)

    def _end(self) -> str:
        """The last block ends with the answer."""
        block, self._open = self._open, None
        return "" if block is None else self._ended(block)

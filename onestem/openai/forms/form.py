"""How a family of models writes reasoning and calls of tools: a description, no code.

An answer is reasoning, text and calls. A call is a few texts around a name and its arguments:

    opening NAME [id_before ID] middle ARGUMENTS closing

Several calls have `separator` between them, and `section` around them all. From this the grammar
that holds a model to a form is made (`grammar`), histories are written (`history`), and answers are
read (`reader`); reading is more tolerant than writing, so a form has patterns for it too.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reasoning:
    """Where reasoning is in an answer.

    Attributes:
        open, close: what it is read between.
        opening, closing: the same as it is written, with blanks.
        anywhere: whether it may begin anywhere, and not only where the answer begins.
    """

    open: str
    close: str
    opening: str
    closing: str
    anywhere: bool = False

    @staticmethod
    def tagged(begin: str = "<think>", end: str = "</think>") -> Reasoning:
        """Reasoning between a tag and its end, each on a line."""
        return Reasoning(open=begin, close=end, opening=f"{begin}\n", closing=f"\n{end}\n\n")


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Arguments as fields, one after the other: texts as they are, other values in JSON.

    Attributes:
        before_key, before_value, after_value: texts around a field's key and its value.
        trims: whether a line's end on either side of a value belongs to the form.
    """

    before_key: str
    before_value: str
    after_value: str
    trims: bool = False


@dataclass(frozen=True, kw_only=True)
class Braces:
    """Arguments like JSON's, but for keys, which are bare and sorted, and texts, which are
    between two `quote`."""

    quote: str


@dataclass(frozen=True, kw_only=True)
class Channels:
    """An answer as messages of channels, each behind a header: reasoning, text, or a call.

    Attributes:
        begins: what a header begins with.
        recipient: the same, where nothing precedes it in a message.
        header: a whole one; its groups are `channel`, and `name` or `name_first` of a tool.
        reasoning: the name of the channel of reasoning.
        ends: what ends a message.
        start: what precedes a header after an end.
        text_header, reasoning_header: as they are written.
        call_headers: texts before a tool's name and after it, of each way to write a call.
    """

    begins: tuple[str, ...]
    recipient: str
    header: re.Pattern[str]
    reasoning: str
    ends: tuple[str, ...]
    start: str
    text_header: str
    reasoning_header: str
    call_headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Blanks that a template writes between the parts of an answer, beside those that a part has
    itself. None: it is not known to keep these, and they are left out.

    Attributes:
        before_call: between a text and a call.
        opening_thought, closing_thought: line ends between reasoning and its marks.
        after_thought: line ends between the end of reasoning and a text.
    """

    before_call: str | None = None
    opening_thought: str | None = None
    closing_thought: str | None = None
    after_thought: str | None = None


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a family writes calls and reasoning.

    Attributes:
        begin: what a call, or a list of calls, begins with.
        head: from there to the arguments; its group `name` is the tool's, its group `id` the
            call's, if the model writes one.
        opening, middle, closing, separator, section: see above.
        id_before, id_pattern: text before an id that the model writes, and a pattern of it.
        again: what precedes a further call of a list; "": it begins as the first one.
        item: `head` of a further call.
        close: what ends a list.
        arguments: how they are written; None: JSON.
        marks: names that may be control tokens of the model, and are in its text then.
        dropped: those around calls that are no part of any.
        silent: a control token that may precede calls, and is in no text.
        id_length: characters of a call's id; 0: as OpenAI's.
        reasoning: None: there is none, or it has a channel.
        channels: None: text and calls follow one another without headers.
    """

    name: str
    begin: str
    head: re.Pattern[str]
    opening: str
    middle: str = ""
    closing: str
    separator: str = ""
    section: tuple[str, str] = ("", "")
    id_before: str = ""
    id_pattern: str = ""
    again: str = ""
    item: re.Pattern[str] | None = None
    close: str = ""
    arguments: Fields | Braces | None = None
    marks: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    silent: str = ""
    id_length: int = 0
    reasoning: Reasoning | None = None
    channels: Channels | None = None

    @property
    def tail(self) -> str:
        """What follows the arguments, blanks aside."""
        return "" if self.channels is not None else "".join(self.closing.split())

    @property
    def has_reasoning(self) -> bool:
        """Whether answers may have reasoning."""
        return self.reasoning is not None or self.channels is not None

    @property
    def reasoning_marks(self) -> tuple[str, ...]:
        """Those of `marks` that an answer without calls may have."""
        if self.channels is not None:
            return self.marks
        return () if self.reasoning is None else (self.reasoning.open, self.reasoning.close)

    def call_id(self, *parts: object) -> str:
        """An id that depends on `parts` alone."""
        digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
        return digest[: self.id_length] if self.id_length else f"call_{digest[:24]}"

    def own_id(self, given: str, name: str, place: int) -> str:
        """The id of a call that is sent back, as the family writes it.

        Args:
            given: the client's, which stays if the family could have written it.
            place: number of calls before it in the conversation.
        """
        if self.id_length:
            fits = len(given) == self.id_length and given.isascii() and given.isalnum()
            return given if fits else self.call_id(given)
        if not self.id_before:
            return given
        before = f"{self.opening.removeprefix(self.begin)}{name}{self.id_before}"
        fits = re.fullmatch(re.escape(before) + self.id_pattern, given) is not None
        return given if fits else f"{before}{place}"

"""Reads answers as they come: one machine for whole and streamed ones, so that both are the same.

Each character is read once. What is given out is certain: nothing is taken back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from onestem.openai.forms.arguments import ArgumentsReader, arguments_reader, held_back
from onestem.openai.forms.form import Form, Gaps

Mode = Literal["text", "thought", "between"]
LONGEST_HEAD = 1000  # maximum characters from a call's beginning to its arguments


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the answers to a request are read.

    Attributes:
        form: of the model.
        calls: whether there may be calls; else they are text.
        texts: of each tool, the parameters that are texts and nothing else.
        opened: whether the prompt ends inside reasoning.
        gaps: what the template writes of blanks; others are the text's or the reasoning's own.
    """

    form: Form
    calls: bool = True
    texts: Mapping[str, Collection[str]] = field(default_factory=dict)
    opened: bool = False
    gaps: Gaps = field(default_factory=Gaps)


@dataclass(slots=True)
class AnswerEvent:
    """What is new in an answer: some text or reasoning, a call's `name` (and its `id`, if the model
    wrote one), or more of the last call's `arguments`; all else is empty. `index` is the call's."""

    text: str = ""
    name: str = ""
    arguments: str = ""
    index: int = -1
    reasoning: str = ""
    id: str = ""


class AnswerReader:
    """Reads one answer's text.

    Attributes:
        thoughts: where reasoning begins and ends in the text with its marks, in characters; an odd
            number of places: it has not ended.
        mode: what is read now.
    """

    def __init__(self, reading: Reading) -> None:
        form = reading.form
        self.thoughts: list[int] = []
        self._num_read = 0  # characters of the text, with those of the buffer
        self._form, self._reading, self._gaps = form, reading, reading.gaps
        self._has_text = False  # since the last call
        self._calls = (form.begin,) if reading.calls and form.begin else ()
        self._marks = _marks_of(form, self._calls, form.dropped if reading.calls else ())
        self._buffer = ""
        self._space = ""  # before what may be a call
        self._num_calls = 0
        self._head = form.head
        self._arguments: ArgumentsReader | None = None
        self._found: list[AnswerEvent] = []
        self.mode: Mode = "text"
        self._begun: str | None = None  # line ends with which a text begins; None: it has begun
        self._read = self._read_on
        if form.reasoning is not None:
            self._read = self._read_start
        elif form.channels is not None:
            self.mode = "between"
        self._may_begin: Callable[[str], object] | None = None  # whether a text may have a mark
        self._holds_blanks = False
        self._note_plain()

    def plain(self, text: str) -> str | None:
        """What is new where no mark can begin, as in most texts: `mode` says what it is. None: the
        text is to be fed."""
        buffer = self._buffer + text
        if self._may_begin is None or self._may_begin(buffer):
            return None
        told = buffer.rstrip() if self._holds_blanks else buffer
        self._buffer = buffer[len(told) :] if told != buffer else ""
        self._num_read += len(text)
        if told:
            self._space = ""
            if self.mode != "thought":
                self._has_text = True
        return told

    def feed(self, text: str) -> list[AnswerEvent]:
        """Read more text; returns the events that are certain now."""
        self._buffer += text
        self._num_read += len(text)
        while self._read():
            pass
        self._note_plain()
        found, self._found = self._found, []
        return found

    def _note_plain(self) -> None:
        self._may_begin = None
        if self._read == self._read_on and self._begun is None:
            marks = self._marks[self.mode]
            self._holds_blanks = marks is not None
            self._may_begin = _never if marks is None else marks.may_begin

    @property
    def has_called(self) -> bool:
        """Whether there are calls, and the last one's arguments have ended."""
        return self._num_calls > 0 and self._read != self._read_arguments

    def finish(self) -> list[AnswerEvent]:
        """The events left at the answer's end: text that only began like something else."""
        if self._read == self._read_start:
            self._begin(self._reading.opened)
            while self._read():
                pass
        while self._buffer and self._read in (self._read_head, self._read_header):
            self._pass_sign()
            while self._read():
                pass
        rest, self._buffer = self._buffer, ""
        if self._arguments is not None:
            self._tell_arguments(self._arguments.take(rest, True)[0])
        elif self._read == self._read_on:
            if self.mode == "thought":
                rest = rest.rstrip("\n")
            is_blank = self.mode == "text" and self._num_calls and not self._has_text
            self._tell(rest.rstrip() if is_blank else rest)
        found, self._found = self._found, []
        return found

    def _tell(self, text: str) -> None:
        """Give out text or reasoning, as the mode says."""
        is_thought = self.mode == "thought"
        if self._begun is not None:
            own = text.lstrip("\n")
            self._begun += text[: len(text) - len(own)]
            gap = self._gaps.opening_thought if is_thought else self._gaps.after_thought
            text = _own(self._begun, gap) + own if own else ""
        if text:
            self._begun, self._space = None, ""
            self._has_text |= not is_thought
            self._found.append(AnswerEvent(reasoning=text) if is_thought else AnswerEvent(text))

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._found.append(AnswerEvent(arguments=text, index=self._num_calls - 1))

    def _read_start(self) -> bool:
        """Find out whether the answer begins with reasoning."""
        assert self._form.reasoning is not None
        mark = self._form.reasoning.open
        begun = self._buffer.lstrip()
        if not begun or (len(begun) < len(mark) and mark.startswith(begun)):
            return False
        if begun.startswith(mark):
            self._buffer = begun[len(mark) :]
            self._begin(True)
        else:
            self._begin(self._reading.opened)
        return True

    def _begin(self, thinks: bool) -> None:
        self._begun = "" if thinks else None
        self._turn("thought" if thinks else "text", 0)
        self._read = self._read_on

    @property
    def _place(self) -> int:
        """Characters of the text before the buffer."""
        return self._num_read - len(self._buffer)

    def _turn(self, mode: Mode, place: int) -> None:
        """What the text is from a place on."""
        if (mode == "thought") != (self.mode == "thought"):
            self.thoughts.append(place)
        self.mode = mode

    def _read_on(self) -> bool:
        """Read text or reasoning up to a mark."""
        marks = self._marks[self.mode]
        found = marks.search(self._buffer) if marks is not None else None
        if found is None:
            kept = marks.undecided(self._buffer) if marks is not None else 0
            told = self._buffer[: len(self._buffer) - kept]
            self._buffer = self._buffer[len(told) :]
            self._tell(told)
            return False
        mark, at = found.group(), found.start()
        before, self._buffer = self._buffer[:at], self._buffer[at:]
        is_thought = self.mode == "thought"
        told = before.rstrip("\n" if is_thought else None)
        self._tell(told)
        self._space += before[len(told) :]
        channels, reasoning = self._form.channels, self._form.reasoning
        if mark in self._calls:
            self._head, self._read = self._form.head, self._read_head
            return True
        if channels is not None and (mark in channels.begins or mark == channels.recipient):
            self._read = self._read_header
            return True
        begin = self._place
        self._buffer = self._buffer[len(mark) :]
        is_end = channels is not None or (reasoning is not None and mark == reasoning.close)
        if is_thought and is_end and self._begun is None and self._space:
            gap = self._gaps.closing_thought
            if gap is not None and self._space.endswith(gap):
                self._tell(self._space.removesuffix(gap))
        if mark not in self._form.dropped:
            self._space = ""
        if reasoning is not None and mark == reasoning.close:
            self._turn("text", self._place)
            self._begun = ""
        elif reasoning is not None and mark == reasoning.open:
            self._turn("thought", begin)
            self._begun = ""
        elif channels is not None:
            self._turn("between", self._place)
        return True

    def _read_header(self) -> bool:
        channels = self._form.channels
        assert channels is not None
        found = channels.header.match(self._buffer, 0, LONGEST_HEAD)
        if found is None:
            return self._no_head()
        begin, name = self._place, found["name"] or found["name_first"]
        self._buffer = self._buffer[found.end() :]
        if name and self._reading.calls:
            self._call(name, "", begin)
        else:
            self._read = self._read_on
            self._turn("thought" if found["channel"] == channels.reasoning else "text", begin)
        return True

    def _read_head(self) -> bool:
        found = self._head.match(self._buffer, 0, LONGEST_HEAD)
        if found is None:
            return self._no_head()
        begin = self._place
        self._buffer = self._buffer[found.end() :]
        self._call(_unescaped(found["name"]), found.groupdict().get("id") or "", begin)
        return True

    def _no_head(self) -> bool:
        """There is no head yet; where it would be too long, it only looked like one."""
        if len(self._buffer) < LONGEST_HEAD:
            return False
        self._pass_sign()
        return True

    def _pass_sign(self) -> None:
        """What seemed to begin is none: read on after its first character."""
        self._tell(self._space + self._buffer[0])
        self._buffer, self._space, self._read = self._buffer[1:], "", self._read_on

    def _call(self, name: str, call_id: str, begin: int) -> None:
        """A call begins, which ends reasoning; `begin`: where."""
        is_after = self._has_text and self.mode == "text"
        gap = self._gaps.before_call
        if is_after and gap is not None and self._space.endswith(gap):
            self._tell(self._space.removesuffix(gap))
        self._space, self._has_text = "", False
        self._found.append(AnswerEvent(name=name, index=self._num_calls, id=call_id))
        self._num_calls += 1
        texts = self._reading.texts.get(name, ())
        self._arguments = arguments_reader(self._form.arguments, texts)
        self._read, self._begun = self._read_arguments, None
        self._turn("text" if self._form.channels is None else "between", begin)

    def _read_arguments(self) -> bool:
        assert self._arguments is not None
        told, self._buffer, ended = self._arguments.take(self._buffer, False)
        self._tell_arguments(told)
        if not ended:
            return False
        self._arguments, self._read = None, self._read_tail
        return True

    def _read_tail(self) -> bool:
        tail, begun = self._form.tail, self._buffer.lstrip()
        if tail[:1] == "}" and (not begun or begun[0] == ","):  # an id after the arguments
            end = begun.find("}")
            if end < 0 and len(begun) < LONGEST_HEAD:
                return False
            self._buffer = begun[max(0, end) :]
        if self._skip(tail) is None:
            return False
        self._read = self._read_after
        return True

    def _read_after(self) -> bool:
        """Read what follows a call: another one of a list, the list's end, or text again."""
        form = self._form
        if form.again:
            again = self._skip(form.again)
            if again is None:
                return False
            if again:
                assert form.item is not None
                self._head, self._read = form.item, self._read_head
                return True
        if form.close and self._skip(form.close) is None:
            return False
        self._read = self._read_on
        return True

    def _skip(self, literal: str) -> bool | None:
        """Take a literal, blanks aside; False: something else follows; None: not known yet."""
        at = 0
        for letter in literal:
            while at < len(self._buffer) and self._buffer[at].isspace():
                at += 1
            if at == len(self._buffer):
                return None
            if self._buffer[at] != letter:
                return False
            at += 1
        self._buffer = self._buffer[at:]
        return True


def _never(text: str) -> bool:
    return False


def _own(blanks: str, gap: str | None) -> str:
    """Those blanks at a text's beginning that are its own."""
    return blanks.removeprefix(gap) if gap is not None and blanks.startswith(gap) else ""


class _Marks:
    """Texts that end what is being read.

    Args:
        texts: at least one.
    """

    def __init__(self, texts: Collection[str]) -> None:
        self.search = re.compile("|".join(map(re.escape, texts))).search
        self._texts = tuple(texts)
        first = "".join(re.escape(text[0]) for text in texts)
        self.may_begin = re.compile(f"[{first}]").search
        self._longest = max(map(len, texts)) - 1

    def undecided(self, text: str) -> int:
        """Number of characters at a text's end that may begin a mark, with the blanks before."""
        size = 0
        if self.may_begin(text, max(0, len(text) - self._longest)):
            size = max(held_back(text, mark) for mark in self._texts)
        before = text[: len(text) - size]
        return size + len(before) - len(before.rstrip())


@cache
def _marks_of(
    form: Form, calls: tuple[str, ...], dropped: tuple[str, ...]
) -> dict[Mode, _Marks | None]:
    """The marks of each mode; None: there are none."""
    channels, reasoning = form.channels, form.reasoning
    often = [*calls, *dropped]
    texts: dict[Mode, list[str]] = {"text": often, "thought": often, "between": often}
    if reasoning is not None:
        texts["text"] = [*often, *([reasoning.open] * reasoning.anywhere)]
        texts["thought"] = [*often, reasoning.close]
    if channels is not None:
        inside = [*often, *channels.begins, *channels.ends]
        texts = {"text": inside, "thought": inside, "between": [*inside, channels.recipient]}
    return {mode: _Marks(some) if some else None for mode, some in texts.items()}


def _unescaped(name: str) -> str:
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return name


@dataclass
class ReadAnswer:
    """A whole answer's text, reasoning and calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # names and arguments
    ids: list[str] = field(default_factory=list)  # of calls; "" where the model wrote none
    is_cut: bool = False  # the last one's arguments have not ended
    thoughts: list[int] = field(default_factory=list)  # as of `AnswerReader`

    @staticmethod
    def of(text: str, reading: Reading) -> ReadAnswer:
        """Read a whole answer."""
        reader, read = AnswerReader(reading), ReadAnswer()
        for event in (*reader.feed(text), *reader.finish()):
            read.add(event)
        read.is_cut = bool(read.calls) and not reader.has_called
        read.thoughts = reader.thoughts
        return read

    def add(self, event: AnswerEvent) -> None:
        """Add what is new."""
        if event.name:
            self.calls.append((event.name, ""))
            self.ids.append(event.id)
        elif event.arguments:
            name, arguments = self.calls[-1]
            self.calls[-1] = (name, arguments + event.arguments)
        self.text += event.text
        self.reasoning += event.reasoning

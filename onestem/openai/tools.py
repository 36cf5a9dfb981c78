"""Tools: what a call looks like in a model's text, how it is held to its schema, how it is read.

Each family of models writes calls in its own form, which its chat template shows:

    Qwen, Hermes   <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>
    Llama 3        {"name": "f", "parameters": {...}}
    Mistral        [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]
    Mistral, new   [TOOL_CALLS]f[ARGS]{...}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from onestem.errors import RequestError, UnsupportedError
from onestem.request import whitespace_of

__all__ = ["CallParser", "Calls", "CheckSchema", "ToolCallEvent", "ToolForm", "Tools", "form_of"]

JsonObject = dict[str, Any]
Mode = Literal["none", "auto", "required"]
# Raises `RequestError` for an invalid schema, `UnsupportedError` for one that would not be
# enforced. It takes the schema, whether other properties are forbidden, and the schema's name.
CheckSchema = Callable[[Mapping[str, Any], bool, str], object]
TokenOf = Callable[[str], int | None]
Piece = str | int  # a text, or a control token's id

_NAME = r'\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
LONGEST_HEAD = 1000  # maximum characters from a call's beginning to its arguments


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The tools that an answer may call.

    Attributes:
        mode: whether it must call.
        allowed: the callable ones as the chat template reads them, by their place in `tools`.
        parallel: whether it may call several at once.
    """

    allowed: Mapping[int, JsonObject]
    mode: Mode = "auto"
    parallel: bool = True


@dataclass(frozen=True, kw_only=True)
class ToolForm:
    """How a family of models writes calls.

    Attributes:
        begin: what a call, or a list of calls, begins with.
        head: from there to the arguments; its group is the name.
        tail: what follows the arguments, whitespace aside.
        again: what precedes a further call of a list; "": it begins as the first one.
        item: `head` of a further call.
        close: what ends a list.
        before_name, before_arguments, end: texts that a call is written with.
        separator: text that is written between calls.
        arguments_mark, end_mark: marks before the arguments and after `end`.
        silent_mark: a control token that may precede calls, and is in no text.
        id_length: characters of a call's id; 0: as OpenAI's.
    """

    name: str
    begin: str
    head: re.Pattern[str]
    tail: str
    before_name: str
    before_arguments: str
    end: str
    separator: str
    again: str = ""
    item: re.Pattern[str] | None = None
    close: str = ""
    arguments_mark: str = ""
    end_mark: str = ""
    silent_mark: str = ""
    id_length: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that may be control tokens of the model, and are in its text then."""
        return tuple(filter(None, (self.begin, self.arguments_mark, self.end_mark)))

    def held_to(
        self,
        tools: Tools,
        response_format: Mapping[str, Any] | None,
        token_of: TokenOf,
        check_schema: CheckSchema,
    ) -> JsonObject:
        """The `response_format` of a request with tools: from the opening of a call on, arguments
        fit their schemas. An answer without calls fits the given `response_format`.

        Args:
            token_of: the id of a control token; None for other texts.

        Raises:
            RequestError: a schema is invalid, or is `strict` and would not be enforced.
        """
        arguments = {
            tool["function"]["name"]: _arguments(tool["function"], place, check_schema)
            for place, tool in tools.allowed.items()
        }
        calls = self._calls(tools, arguments, token_of)
        if tools.mode != "required":
            only_calls = self._calls(replace(tools, mode="required"), arguments, token_of)
            if response_format is not None and response_format["type"] != "text":
                calls = _either(only_calls, _format_of(response_format))
        else:
            only_calls = calls
        silent = token_of(self.silent_mark) if self.silent_mark else None
        if silent is not None:
            calls = _either(_sequence(_format(silent), only_calls), calls)
        return {"type": "structural_tag", "format": calls}

    def _calls(
        self, tools: Tools, arguments: Mapping[str, JsonObject], token_of: TokenOf
    ) -> JsonObject:
        """The format of one call or several, with text around them unless they are required."""

        def mark(text: str) -> Piece:
            token = token_of(text) if text else None
            return text if token is None else token

        begin, end = mark(self.begin), [self.end, mark(self.end_mark)]
        once = not tools.parallel
        if self.again == ",":  # all calls are in one list, which is one tag
            items = [
                _tag([f'{{"name": {json.dumps(name)}, "arguments": '], schema, ["}"])
                for name, schema in arguments.items()
            ]
            calls = {**_separated(", ", items), "stop_after_first": once}
            tags, once = [_tag([begin, self.before_name], calls, end)], True
        else:
            bare = self.before_name.startswith(self.begin)  # a call has no mark
            opening = [self.before_name] if bare else [begin, self.before_name]
            tags = [
                _tag(
                    [*opening, name, self.before_arguments, mark(self.arguments_mark)], schema, end
                )
                for name, schema in arguments.items()
            ]
        if tools.mode == "required":
            return {**_separated(self.separator, tags), "stop_after_first": once}
        made: JsonObject = {"tags": tags, "stop_after_first": once}
        if isinstance(begin, int):
            others = [one for one in map(mark, self.marks) if isinstance(one, int) and one != begin]
            tokens = {"trigger_tokens": [begin], "exclude_tokens": others}
            return {"type": "token_triggered_tags", **tokens, **made}
        # Plain JSON may begin like a call without a mark: only the whole opening makes it a call.
        is_marked = not self.before_name.startswith(self.begin)
        triggers = [begin] if is_marked else [tag["begin"] for tag in tags]
        return {"type": "triggered_tags", "triggers": triggers, **made}

    def call_id(self, *parts: object) -> str:
        """An id that depends on `parts` alone."""
        digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
        return digest[: self.id_length] if self.id_length else f"call_{digest[:24]}"


def _tag(opening: Sequence[Piece], content: JsonObject, closing: Sequence[Piece]) -> JsonObject:
    begin, *before = _joined(opening)
    *after, end = _joined(closing) or [""]
    return {
        "type": "tag",
        "begin": begin if isinstance(begin, str) else _format(begin),
        "content": _sequence(*map(_format, before), content, *map(_format, after)),
        "end": end if isinstance(end, str) else _format(end),
    }


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces, with adjacent texts joined."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and isinstance(piece, str) and isinstance(joined[-1], str):
            joined[-1] += piece
        elif piece != "":
            joined.append(piece)
    return joined


def _format(piece: Piece) -> JsonObject:
    if isinstance(piece, int):
        return {"type": "token", "token": piece}
    return {"type": "const_string", "value": piece}


def _sequence(*elements: JsonObject) -> JsonObject:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: JsonObject) -> JsonObject:
    return {"type": "or", "elements": list(elements)}


def _separated(separator: str, tags: Sequence[JsonObject]) -> JsonObject:
    """At least one of the tags."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
    }


# Arguments of a function whose schema would not be enforced.
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


def _arguments(function: Mapping[str, Any], place: int, check: CheckSchema) -> JsonObject:
    """The format of a function's arguments, spaced as chat templates write them (`tojson`), so that
    the next prompt has the tokens that were sampled."""
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    name = f"tools[{place}].function.parameters"
    try:
        check(schema, True, name)
    except UnsupportedError as error:
        if function.get("strict"):
            raise RequestError(f"{error}, or leave out strict") from error
        schema = _ANY_OBJECT
    return {"type": "json_schema", "json_schema": schema, "whitespace": "spaced", "name": name}


def _format_of(response_format: Mapping[str, Any]) -> JsonObject:
    said = whitespace_of(response_format)
    form = {"type": "json_schema", **({"whitespace": said} if said else {})}
    if response_format["type"] == "json_object":
        return {**form, "json_schema": _ANY_OBJECT}
    if response_format["type"] != "json_schema":
        raise RequestError(
            f"response_format of type {response_format['type']} beside tools: leave one of them out"
        )
    return {
        **form,
        "json_schema": response_format["json_schema"]["schema"],
        "name": "response_format.json_schema.schema",
    }


HERMES = ToolForm(
    name="hermes",
    begin="<tool_call>",
    head=re.compile(r"<tool_call>\s*" + _NAME),
    tail="}</tool_call>",
    before_name='\n{"name": "',
    before_arguments='", "arguments": ',
    end="}\n",
    end_mark="</tool_call>",
    separator="\n",
)
LLAMA = ToolForm(
    name="llama3",
    begin='{"name": ',
    head=re.compile(_NAME),
    tail="}",
    before_name='{"name": "',
    before_arguments='", "parameters": ',
    end="}",
    separator="; ",
    again=";",
    silent_mark="<|python_tag|>",
    item=re.compile(r"\s*" + _NAME),
)
MISTRAL = ToolForm(
    name="mistral",
    begin="[TOOL_CALLS]",
    head=re.compile(r"\[TOOL_CALLS\]\s*\[\s*" + _NAME),
    tail="}",
    before_name=" [",
    before_arguments="",
    end="]",
    separator="",
    again=",",
    item=re.compile(r"\s*" + _NAME),
    close="]",
    id_length=9,
)
MISTRAL_ARGS = ToolForm(
    name="mistral-args",
    begin="[TOOL_CALLS]",
    head=re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)"),
    tail="",
    before_name="",
    before_arguments="",
    end="",
    separator="",
    arguments_mark="[ARGS]",
    id_length=9,
)


def form_of(template: str) -> ToolForm | None:
    """The form of calls in a chat template; None: it has no tools, or calls of another form."""
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return HERMES
    if re.search(r'"parameters":|<\|python_tag\|>', template):
        return LLAMA
    return None


# ----------------------------------------------------------------------------- reading


@dataclass(slots=True)
class ToolCallEvent:
    """What is new in an answer: some text, a call's `name`, or more of the last call's
    `arguments`; the other two are empty. `index` is the call's."""

    text: str = ""
    name: str = ""
    arguments: str = ""
    index: int = -1


class CallParser:
    """Reads one answer's text as it comes, each character once."""

    def __init__(self, form: ToolForm) -> None:
        self._form = form
        self._buffer = ""
        self._space = ""  # before what may be a call
        self._read = self._read_text
        self._head = form.head
        self._num_calls = 0
        self._depth = 0
        self._in_string = self._escaped = False
        self._found: list[ToolCallEvent] = []

    def feed(self, text: str) -> list[ToolCallEvent]:
        """Read more text; returns the events that are certain now."""
        self._buffer += text
        while self._read():
            pass
        found, self._found = self._found, []
        return found

    @property
    def has_called(self) -> bool:
        """Whether there are calls, and the last one's arguments have ended."""
        return self._num_calls > 0 and self._read != self._read_arguments

    def finish(self) -> list[ToolCallEvent]:
        """The events left at the answer's end: text that only began like a call."""
        rest, self._buffer = self._buffer, ""
        if self._read == self._read_head:
            self._tell(self._space + rest)
        elif self._read == self._read_text:
            self._tell(rest if not self._num_calls else rest.rstrip())
        found, self._found = self._found, []
        return found

    def _tell(self, text: str) -> None:
        if text:
            self._found.append(ToolCallEvent(text=text))

    def _read_text(self) -> bool:
        at = self._buffer.find(self._form.begin)
        if at >= 0:
            before = self._buffer[:at]
            self._tell(before.rstrip())
            self._space = before[len(before.rstrip()) :]
            self._buffer = self._buffer[at:]
            self._head, self._read = self._form.head, self._read_head
            return True
        kept = len(self._buffer) - _undecided(self._buffer, self._form.begin)
        self._tell(self._buffer[:kept])
        self._buffer = self._buffer[kept:]
        return False

    def _read_head(self) -> bool:
        found = self._head.match(self._buffer)
        if found is None:
            if len(self._buffer) <= LONGEST_HEAD:
                return False
            self._tell(self._space + self._buffer)  # it only looked like a call
            self._buffer, self._read = "", self._read_text
            return False
        name = found[1]
        self._found.append(ToolCallEvent(name=_unescaped(name), index=self._num_calls))
        self._num_calls += 1
        self._buffer = self._buffer[found.end() :]
        self._depth, self._in_string, self._escaped = 0, False, False
        self._read = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        if self._depth == 0:
            self._buffer = self._buffer.lstrip()
        end = self._end_of_value()
        read = self._buffer if end is None else self._buffer[:end]
        if read:
            self._found.append(ToolCallEvent(arguments=read, index=self._num_calls - 1))
        self._buffer = self._buffer[len(read) :]
        if end is None:
            return False
        self._read = self._read_tail
        return True

    def _end_of_value(self) -> int | None:
        """Where the current object ends in the buffer; None: not in it."""
        for at, letter in enumerate(self._buffer):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + (self._depth == 0)
        return None

    def _read_tail(self) -> bool:
        if self._skip(self._form.tail) is None:
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
        self._read = self._read_text
        return True

    def _skip(self, literal: str) -> bool | None:
        """Take a literal, whitespace aside; False: something else follows; None: not known yet."""
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


def _unescaped(name: str) -> str:
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return name


def _undecided(text: str, begin: str) -> int:
    """Number of characters at a text's end that may begin a call, with the whitespace before
    it."""
    length = next((n for n in range(len(begin) - 1, 0, -1) if text.endswith(begin[:n])), 0)
    before = text[: len(text) - length]
    return length + len(before) - len(before.rstrip())


@dataclass
class Calls:
    """A whole answer's text and calls."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # names and arguments
    is_cut: bool = False  # the last one's arguments have not ended

    @staticmethod
    def of(text: str, form: ToolForm) -> Calls:
        """Read a whole answer."""
        parser, found = CallParser(form), Calls()
        for event in (*parser.feed(text), *parser.finish()):
            if event.name:
                found.calls.append((event.name, ""))
            elif event.arguments:
                name, arguments = found.calls[-1]
                found.calls[-1] = (name, arguments + event.arguments)
            else:
                found.text += event.text
        found.is_cut = bool(found.calls) and not parser.has_called
        return found

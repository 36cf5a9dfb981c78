"""The grammar that holds an answer to a form: structural tags (`engine.grammar.tags`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from onestem.errors import RequestError
from onestem.openai.forms.form import Channels, Form, Reasoning
from onestem.openai.forms.values import (
    Piece,
    arguments_format,
    choice,
    const,
    listed_values,
    sequence,
    tag,
)
from onestem.request import whitespace_of

JsonObject = dict[str, Any]
Mode = Literal["none", "auto", "required"]
# The schema that arguments are held to. It takes that of their function, whether to refuse what
# would not be enforced, and the schema's name, and raises `RequestError` for an invalid one.
HoldSchema = Callable[[Mapping[str, Any], bool, str], Mapping[str, Any]]
TokenOf = Callable[[str], int | None]


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

    @property
    def texts(self) -> dict[str, list[str]]:
        """The parameters of each that are texts and nothing else."""
        return {
            tool["function"]["name"]: [
                name for name, schema in _properties(tool).items() if _is_text(schema)
            ]
            for tool in self.allowed.values()
        }


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = (tool["function"].get("parameters") or {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    listed = listed_values(schema)
    if listed is not None:
        return all(isinstance(one, str) for one in listed)
    return schema.get("type") == "string"


def held_to(
    form: Form,
    tools: Tools,
    response_format: Mapping[str, Any] | None,
    token_of: TokenOf,
    hold_schema: HoldSchema,
    *,
    opened: bool = False,
) -> JsonObject:
    """The `response_format` of a request with tools: from the opening of a call on, arguments fit
    their schemas. An answer without calls fits the given `response_format`.

    Args:
        token_of: the id of a control token; None for other texts.
        opened: whether the prompt ends inside reasoning.

    Raises:
        RequestError: a schema is invalid, or is `strict` and would not be enforced.
    """
    writer = _Writer(form, tools, token_of, hold_schema)
    answer = None
    if response_format is not None and response_format["type"] != "text":
        answer = _format_of(response_format)
    if form.channels is not None:
        return _made(writer.channelled(form.channels, answer))
    required = writer.required()
    if tools.mode == "required":
        calls = required
        if form.reasoning is not None:
            calls = writer.behind_reasoning(required, opened)
    elif answer is not None:
        calls = choice(required, answer)
    else:
        calls = writer.free(opened)
    silent = token_of(form.silent) if form.silent else None
    if silent is not None:
        calls = choice(sequence(const(silent), required), calls)
    return _made(calls)


def _made(tags: JsonObject) -> JsonObject:
    return {"type": "structural_tag", "format": tags}


class _Writer:
    """Makes the formats of one request.

    Args:
        as of `held_to`.
    """

    def __init__(
        self, form: Form, tools: Tools, token_of: TokenOf, hold_schema: HoldSchema
    ) -> None:
        self._form, self._tools = form, tools
        every = [*form.marks, *(form.channels.ends if form.channels else ())]
        every += form.reasoning_marks
        self._tokens = {mark: token for mark in every if (token := token_of(mark)) is not None}
        self._cuts = re.compile("|".join(map(re.escape, self._tokens)) or "(?!)")
        arguments = {
            tool["function"]["name"]: _held(tool["function"], place, hold_schema)
            for place, tool in tools.allowed.items()
        }
        self._arguments = {
            name: arguments_format(form.arguments, schema, named, self.pieces)
            for name, (schema, named) in arguments.items()
        }

    def pieces(self, text: str) -> list[Piece]:
        """A text cut into control tokens and what is between them."""
        found: list[Piece] = []
        at = 0
        for mark in self._cuts.finditer(text):
            found += [text[at : mark.start()], self._tokens[mark.group()]]
            at = mark.end()
        return [piece for piece in (*found, text[at:]) if piece != ""]

    def _call(self, name: str, opening: str, middle: str, closing: str) -> JsonObject:
        form, arguments = self._form, self._arguments[name]
        if form.id_before:
            before = self.pieces(opening + name + form.id_before)
            own_id = {"type": "regex", "pattern": form.id_pattern}
            inside = [own_id, *map(const, self.pieces(middle)), arguments]
        else:
            before, inside = self.pieces(opening + name + middle), [arguments]
        return tag(before, sequence(*inside), self.pieces(closing))

    def _calls(self) -> list[JsonObject]:
        form = self._form
        return [
            self._call(name, form.opening, form.middle, form.closing) for name in self._arguments
        ]

    def _together(self) -> tuple[list[JsonObject], str, bool]:
        """Tags of calls, the text between them, and whether there may be one alone."""
        form, once = self._form, not self._tools.parallel
        before, after = form.section
        calls = self._calls()
        if not before:
            return calls, form.separator, once
        inside = {**_separated(form.separator, calls), "stop_after_first": once}
        return [tag(self.pieces(before), inside, self.pieces(after))], "", True

    def required(self) -> JsonObject:
        """Calls and nothing else."""
        tags, separator, once = self._together()
        return {**_separated(separator, tags), "stop_after_first": once}

    def free(self, opened: bool) -> JsonObject:
        """Text, in which calls are held; `opened`: reasoning precedes it."""
        form = self._form
        tags, _, once = self._together()
        made: JsonObject = {"tags": tags, "stop_after_first": once}
        first = self.pieces(form.section[0] or form.opening)[0]
        if isinstance(first, int):
            others = sorted(set(self._tokens.values()) - {first})
            tokens = {"trigger_tokens": [first], "exclude_tokens": others}
            text = {"type": "token_triggered_tags", **tokens, **made}
        else:
            # Plain JSON may begin like a call without a mark: only all of it makes it a call.
            trigger = form.begin if first.startswith(form.begin) else first
            is_plain = trigger.startswith("{")
            triggers = [one["begin"] for one in tags] if is_plain else [trigger]
            text = {"type": "triggered_tags", "triggers": triggers, **made}
        reasoning = form.reasoning
        if reasoning is None or self._tokens.keys().isdisjoint(form.reasoning_marks):
            return text  # which may have reasoning in it
        return choice(text, sequence(self._thought(reasoning, opened), text))

    def behind_reasoning(self, calls: JsonObject, opened: bool) -> JsonObject:
        """Calls that reasoning may precede; `opened`: its opening is there."""
        assert self._form.reasoning is not None
        thought = self._thought(self._form.reasoning, opened)
        blank = {"type": "regex", "pattern": r"\n{0,2}"}
        return choice(calls, sequence(thought, blank, calls))

    def _thought(self, reasoning: Reasoning, opened: bool) -> JsonObject:
        begin = [] if opened else self.pieces(reasoning.open)
        return tag(begin, self._text(), self.pieces(reasoning.close))

    def _text(self) -> JsonObject:
        """Any text without control tokens of the form."""
        if self._tokens:
            return {"type": "any_tokens", "exclude_tokens": sorted(self._tokens.values())}
        return {"type": "any_text"}

    def channelled(self, channels: Channels, answer: JsonObject | None) -> JsonObject:
        """Messages of channels: reasoning, then a text or a call."""
        start = self.pieces(channels.start)
        end = self.pieces(channels.ends[0])
        calls = [
            self._call(name, opening, middle, "")
            for name in self._arguments
            for opening, middle in channels.call_headers
        ]
        last: list[JsonObject] = calls
        if self._tools.mode != "required":
            header = map(const, self.pieces(channels.text_header))
            last = [*calls, sequence(*header, answer or self._text())]
        thought = tag(self.pieces(channels.reasoning_header), self._text(), [*end, *start])
        return sequence({"type": "star", "content": thought}, choice(*last))


def _separated(separator: str, tags: Sequence[JsonObject]) -> JsonObject:
    """At least one of the tags."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
    }


# Arguments of a function whose schema would not be enforced.
ANY_OBJECT = {"type": "object", "additionalProperties": True}


def _held(
    function: Mapping[str, Any], place: int, hold_schema: HoldSchema
) -> tuple[Mapping[str, Any], str]:
    """The schema that a function's arguments are held to, and its name in errors."""
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    name = f"tools[{place}].function.parameters"
    return hold_schema(schema, bool(function.get("strict")), name), name


def _format_of(response_format: Mapping[str, Any]) -> JsonObject:
    said = whitespace_of(response_format)
    form = {"type": "json_schema", **({"whitespace": said} if said else {})}
    if response_format["type"] == "json_object":
        return {**form, "json_schema": ANY_OBJECT}
    if response_format["type"] != "json_schema":
        raise RequestError(
            f"response_format of type {response_format['type']} beside tools: leave one of them out"
        )
    return {
        **form,
        "json_schema": response_format["json_schema"]["schema"],
        "name": "response_format.json_schema.schema",
    }

"""Makes batch lines of a table's rows: `{column}` in a template stands for a row's value."""

from __future__ import annotations

import datetime
import difflib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from onestem.batch.format import BatchLine, LineError
from onestem.checked import read_json, show
from onestem.errors import ConfigError
from onestem.openai.schema import URL_OF_KIND, Kind
from onestem.options import InputOptions
from onestem.rawtext import RawText, Span

Row = Mapping[str, Any]

MARK = re.compile(r"(\{\{|\}\})|\{([^{}]*)\}|([{}])")
ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}


@dataclass(frozen=True)
class Field:
    """A column's place in a template."""

    column: str


@dataclass(frozen=True)
class Template:
    """A text with fields; `parts` are its literals and fields."""

    parts: Sequence[str | Field]

    @staticmethod
    def of(text: str, option: str) -> Template:
        """Read a template; raises `ConfigError`, which names the template's option."""
        parts: list[str | Field] = []
        literal, end = "", 0
        for mark in MARK.finditer(text):
            brace, column, odd = mark.groups()
            if odd or column == "":
                raise ConfigError(
                    f"{option} has {mark.group()!r} at character {mark.start() + 1}, which is no "
                    "field: write {{ and }} for braces"
                )
            literal += text[end : mark.start()] + (brace[0] if brace else "")
            end = mark.end()
            if column is not None:
                parts += [literal, Field(column)] if literal else [Field(column)]
                literal = ""
        literal += text[end:]
        return Template([*parts, literal] if literal else parts)

    @property
    def columns(self) -> list[str]:
        """The columns of its fields, in their order."""
        return [part.column for part in self.parts if isinstance(part, Field)]

    @property
    def source(self) -> str:
        """The template as it is written."""
        return "".join(
            f"{{{part.column}}}"
            if isinstance(part, Field)
            else re.sub(r"[{}]", r"\g<0>\g<0>", part)
            for part in self.parts
        )

    @property
    def is_field(self) -> bool:
        """Whether it is a single field."""
        return len(self.parts) == 1 and isinstance(self.parts[0], Field)

    def value(self, row: Row) -> Any:
        """`text`; of a single field, lists and objects are kept as they are."""
        if self.is_field:
            value = _value(row, self.columns[0])
            if isinstance(value, (list, dict)):
                return value
        return self.text(row)

    def text(self, row: Row) -> str:
        """The template's text for a row."""
        return "".join(text for text, _ in self._texts(row))

    def quoted(self, row: Row, *, alone: bool) -> list[tuple[Span, ...]]:
        """Where a row's values are in its text, or in each of its texts. `alone`: a single field's
        is the text itself, and is not quoted."""
        if not self.is_field:
            return [RawText.joined(RawText.of(*one) for one in self._texts(row)).quoted]
        if alone:
            return [()]
        value = self.value(row)
        texts = value if isinstance(value, list) else [value]
        return [RawText.of(one, False).quoted if isinstance(one, str) else () for one in texts]

    def _texts(self, row: Row) -> Iterator[tuple[str, bool]]:
        """The parts' texts, and whether each is the template's own."""
        for part in self.parts:
            if isinstance(part, str):
                yield part, True
            else:
                yield text_of(_value(row, part.column), part.column), False


def _value(row: Row, column: str) -> Any:
    if column not in row:
        raise LineError("invalid_row", _no_column(column, row))
    value = row[column]
    if value is None:
        raise LineError("invalid_row", f"column {show(column)} is null: fill it, or drop the row")
    return _json_value(value, column)


def text_of(value: Any, column: str) -> str:
    """A value as text in a prompt: text unchanged, all else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that are not UTF-8 were read as lone surrogates
        raise LineError(
            "invalid_row", f"column {show(column)} is not UTF-8: save the file as UTF-8"
        ) from error
    return text


def _json_value(value: Any, column: str) -> Any:
    """JSON for types of Parquet and Arrow that JSON lacks; nulls inside of objects are left out."""
    if isinstance(value, dict):
        each = {name: one for name, one in value.items() if one is not None}
        return {name: _json_value(one, column) for name, one in each.items()}
    if isinstance(value, list):
        return [_json_value(one, column) for one in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (Decimal, datetime.timedelta)):
        return str(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise LineError(
        "invalid_row",
        f"column {show(column)} is {type(value).__name__}: a prompt is made of text, numbers, "
        "lists and objects",
    )


def _no_column(column: str, there: Collection[str]) -> str:
    near = difflib.get_close_matches(column, there, 1)
    hint = f" (did you mean {show(near[0])}?)" if near else ""
    return f"there is no column {show(column)}{hint}, there are {_listed(there)}"


def _listed(columns: Collection[str]) -> str:
    names = [" ".join(name.split())[:60] for name in [*columns][:20]]
    return ", ".join(names) + (f" and {len(columns) - 20} more" if len(columns) > 20 else "")


def expected_columns(name: str, recipe: Recipe | None, there: Sequence[str]) -> None:
    """Raise `ConfigError` for a table without the columns that the options name."""
    if not there:
        raise ConfigError(f"{name} has no table with columns: name a file or a data set")
    if recipe is None:
        raise ConfigError(
            f"{name} is a table with the columns {_listed(there)}: say what a prompt is made of, "
            f"like --prompt '{{{_listed(there[:1])}}}'"
        )
    for option, column in recipe.asked():
        if column not in there:
            raise ConfigError(f"{name}: {_no_column(column, there)}: correct --{option}")


@dataclass(frozen=True)
class Recipe:
    """How a row becomes a batch line.

    Attributes:
        kind: of request.
        fields: templates by the body's field: a `Template`, or lists and objects of them.
        body: other fields of each body.
        id_column: column with the `custom_id`; None: the row's number.
    """

    kind: Kind
    fields: Mapping[str, Any]
    body: Mapping[str, Any]
    id_column: str | None

    @staticmethod
    def of(options: InputOptions) -> Recipe | None:
        """The recipe of the options; None: there is no template, and lines are batch lines.

        Raises:
            ConfigError: the options do not fit together, or a template is malformed.
        """
        given = {"prompt": options.prompt, "messages": options.messages,
                 "completions": options.completions, "text": options.text}  # fmt: skip
        named = {name: text for name, text in given.items() if text is not None}
        if not named:
            for name in ("body", "id"):
                if getattr(options, name) is not None:
                    raise ConfigError(f"--{name} is for rows: give --prompt or --messages too")
            return None
        kinds: dict[tuple[str, ...], Kind] = {
            ("prompt",): "completion",
            ("messages",): "chat",
            ("prompt", "completions"): "score",
            ("text",): "score",
        }
        kind = kinds.get(tuple(named))
        if kind is None:
            both = " and ".join(f"--{name}" for name in named)
            raise ConfigError(
                f"{both}: give --prompt, --messages, --text, or --prompt with --completions"
            )
        fields = {name: _read(name, text) for name, text in named.items()}
        if not any(template.columns for _, template in _templates(fields)):
            raise ConfigError(
                f"--{next(iter(named))} has no field, so all rows would be alike: name a column "
                "like {question}"
            )
        return Recipe(kind, fields, _read_body(options.body, fields), options.id)

    def asked(self) -> Iterator[tuple[str, str]]:
        """(option, column) for each column that the options name."""
        for name, template in _templates(self.fields):
            yield from ((name, column) for column in template.columns)
        if self.id_column is not None:
            yield "id", self.id_column

    @property
    def columns(self) -> list[str]:
        """The columns that are read, each once."""
        return list(dict.fromkeys(column for _, column in self.asked()))

    def line(self, number: int, row: Row) -> BatchLine:
        """The batch line of a row; raises `LineError`."""
        custom_id = str(number)
        if self.id_column is not None:
            custom_id = text_of(_value(row, self.id_column), self.id_column)
        try:
            body = dict(self.body) | {
                name: _mapped(template, Template, lambda one: one.value(row))
                for name, template in self.fields.items()
            }
        except LineError as error:
            error.custom_id = custom_id
            raise
        if isinstance(text := body.get("messages"), str):  # a text never sets its own role
            body["messages"] = [{"role": "user", "content": text}]
        if isinstance(text := body.get("completions"), str):
            body["completions"] = [text]
        line = {
            "custom_id": custom_id,
            "method": "POST",
            "url": URL_OF_KIND[self.kind],
            "body": body,
        }
        quoted = {} if self.kind == "chat" else _quoted(self.fields, row)
        return BatchLine(json.dumps(line, ensure_ascii=False).encode(), quoted)


def _quoted(fields: Mapping[str, Any], row: Row) -> dict[str, list[tuple[Span, ...]]]:
    """Where a row's values are in each text of the fields; empty where they are in none. A
    completion has its prompt's text beside it, unless that is a single field too."""
    prompt = fields.get("prompt")
    has_text = isinstance(prompt, Template) and not prompt.is_field
    found = {
        name: [
            spans
            for template in _leaves(value)
            for spans in template.quoted(row, alone=name != "completions" or not has_text)
        ]
        for name, value in fields.items()
    }
    return found if any(map(any, found.values())) else {}


def _read(name: str, text: str) -> Any:
    """An option's template: JSON if the option takes JSON and the text is a list, else text."""
    option = f"--{name}"
    if name in ("messages", "completions") and text.lstrip().startswith("["):
        try:
            value = read_json(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{option} begins like a JSON list and is none: {error}: correct it"
            ) from error
        return _mapped(value, str, lambda one: Template.of(one, option))
    plain = re.sub(r"\\[nt\\]", lambda escape: ESCAPES[escape.group()], text)
    return Template.of(plain, option)


def _read_body(text: str | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        body = read_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"--body is {show(body)}, expected an object")
    for name in fields:
        if name in body:
            raise ConfigError(f"--body has {name}, which --{name} makes: leave one of them out")
    return body


def _mapped(value: Any, kind: type, of: Callable[[Any], Any]) -> Any:
    """`value` with `of` applied to each thing of a kind in its lists and objects."""
    if isinstance(value, dict):
        return {name: _mapped(one, kind, of) for name, one in value.items()}
    if isinstance(value, list):
        return [_mapped(one, kind, of) for one in value]
    return of(value) if isinstance(value, kind) else value


def _templates(fields: Mapping[str, Any]) -> Iterator[tuple[str, Template]]:
    for name, value in fields.items():
        for template in _leaves(value):
            yield name, template


def _leaves(value: Any) -> Iterator[Template]:
    if isinstance(value, Template):
        yield value
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)

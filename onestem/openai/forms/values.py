"""Formats of a call's arguments, of each syntax in which families write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onestem.openai.forms.form import Braces, Fields

JsonObject = dict[str, Any]
Piece = str | int  # a text, or a control token's id
Pieces = Callable[[str], list[Piece]]


def const(piece: Piece) -> JsonObject:
    """The format of a text or of a control token."""
    if isinstance(piece, int):
        return {"type": "token", "token": piece}
    return {"type": "const_string", "value": piece}


def sequence(*elements: JsonObject) -> JsonObject:
    """One format after the other."""
    return {"type": "sequence", "elements": list(elements)}


def tag(opening: Sequence[Piece], content: JsonObject, closing: Sequence[Piece]) -> JsonObject:
    """A content between texts and control tokens."""
    begin, *before = opening or [""]
    *after, end = closing or [""]
    return {
        "type": "tag",
        "begin": begin if isinstance(begin, str) else const(begin),
        "content": sequence(*map(const, before), content, *map(const, after)),
        "end": end if isinstance(end, str) else const(end),
    }


def arguments_format(
    syntax: Fields | Braces | None, schema: Mapping[str, Any], name: str, pieces: Pieces
) -> JsonObject:
    """The format of arguments.

    Args:
        syntax: None: JSON, spaced as chat templates write it (`tojson`), so that the next prompt
            has the tokens that were sampled.
        schema: of an object; checked.
        name: the schema's, in errors.
        pieces: a text cut at control tokens.
    """
    if syntax is None:
        return _json(schema, name)
    if isinstance(syntax, Fields):
        return _fields(syntax, schema, name, pieces)
    return _Braced(syntax, schema, name, pieces).value(schema)


def _json(schema: Any, name: str, root: Mapping[str, Any] | None = None) -> JsonObject:
    if root is not None and isinstance(schema, Mapping):  # references lead to the whole's parts
        schema = {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}
    return {"type": "json_schema", "json_schema": schema, "whitespace": "spaced", "name": name}


def choice(*elements: JsonObject) -> JsonObject:
    """One of the formats."""
    return {"type": "or", "elements": list(elements)} if len(elements) > 1 else elements[0]


def _optional(content: JsonObject) -> JsonObject:
    return {"type": "optional", "content": content}


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only values that a schema has; None: it does not list them."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return listed if isinstance(listed, list) and listed else None


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """An object's properties; None: they are not said alone, and any will do."""
    given = schema.get("properties")
    others = schema.keys() & {"$ref", "anyOf", "oneOf", "allOf", "patternProperties", "enum"}
    is_any = given is None and schema.get("additionalProperties", given is None) is not False
    if others or not isinstance(given, Mapping | None) or (is_any and given is None):
        return None
    return given or {}


def _fields(syntax: Fields, schema: Mapping[str, Any], name: str, pieces: Pieces) -> JsonObject:
    after = pieces(syntax.after_value)
    properties = _properties(schema)
    if properties is None:
        any_key = {"type": "regex", "pattern": "[A-Za-z0-9_.-]{1,64}"}
        inside = [any_key, *map(const, pieces(syntax.before_value)), _text(after)]
        one = tag(pieces(syntax.before_key), sequence(*inside), after)
        return {"type": "star", "content": one}
    required = schema.get("required") or ()
    made = []
    for key, value in properties.items():
        before = pieces(syntax.before_key + key + syntax.before_value)
        field = tag(before, _field_value(value, name, schema, after), after)
        made.append(field if key in required else _optional(field))
    return sequence(*made) if made else const("")


def _field_value(
    schema: Any, name: str, root: Mapping[str, Any], after: Sequence[Piece]
) -> JsonObject:
    if not isinstance(schema, Mapping):
        return _text(after)
    listed = listed_values(schema)
    if listed is not None:
        texts = [one if isinstance(one, str) else json.dumps(one) for one in listed]
        return choice(*map(const, texts))
    kind = schema.get("type")
    if kind == "string":
        return _text(after, schema.get("maxLength"))
    if (isinstance(kind, list) and "string" in kind) or (kind is None and "$ref" not in schema):
        return _text(after)
    return _json(schema, name, root)


def _text(after: Sequence[Piece], longest: Any = None) -> JsonObject:
    """Any text that what follows it does not end."""
    if after and isinstance(after[0], int):
        return {"type": "any_tokens", "exclude_tokens": [after[0]]}
    limit = {"max_chars": longest} if isinstance(longest, int) else {}
    return {"type": "any_text", **limit}


class _Braced:
    """Formats of values between braces.

    Args:
        as of `arguments_format`.
    """

    def __init__(self, syntax: Braces, root: Mapping[str, Any], name: str, pieces: Pieces) -> None:
        self._quote, self._root, self._name = pieces(syntax.quote), root, name

    def value(self, schema: Any, depth: int = 0) -> JsonObject:
        """The format of a value."""
        if not isinstance(schema, Mapping):
            return self._any(depth)
        listed = listed_values(schema)
        if listed is not None:
            return choice(*map(self._const, listed))
        kind = schema.get("type")
        if kind == "string":
            return self._quoted(schema.get("maxLength"))
        if kind in ("integer", "number", "boolean", "null"):
            return _json(schema, self._name, self._root)
        if kind == "array":
            return self._list(self.value(schema.get("items"), depth + 1))
        if kind == "object" or (kind is None and "properties" in schema):
            properties = _properties(schema)
            if properties is not None:
                return self._object(properties, schema.get("required") or (), depth)
        return self._any(depth, kind)

    def _object(
        self, properties: Mapping[str, Any], required: Sequence[str], depth: int
    ) -> JsonObject:
        pairs = [
            (sequence(const(f"{key}:"), self.value(value, depth + 1)), key in required)
            for key, value in sorted(properties.items())
        ]
        # From the last pair to the first: what may follow where nothing is there yet, and where
        # something is.
        first: JsonObject = const("")
        later: JsonObject = const("")
        for pair, is_needed in reversed(pairs):
            begun, further = sequence(pair, later), sequence(const(","), pair)
            first = begun if is_needed else choice(begun, first)
            later = sequence(further if is_needed else _optional(further), later)
        return sequence(const("{"), first, const("}"))

    def _list(self, item: JsonObject) -> JsonObject:
        more = {"type": "star", "content": sequence(const(","), item)}
        return sequence(const("["), _optional(sequence(item, more)), const("]"))

    def _quoted(self, longest: Any = None) -> JsonObject:
        return tag(self._quote, _text(self._quote, longest), self._quote)

    def _const(self, value: Any) -> JsonObject:
        if isinstance(value, str):
            return sequence(*map(const, [*self._quote, value, *self._quote]))
        return const(json.dumps(value))

    def _any(self, depth: int, kind: Any = None) -> JsonObject:
        """Any value, three levels deep."""
        plain = {"type": "regex", "pattern": r"-?[0-9]{1,15}(\.[0-9]{1,15})?|true|false|null"}
        simple = choice(plain, self._quoted())
        if depth > 2:
            return simple
        inner = self._any(depth + 1)
        key = {"type": "regex", "pattern": "[A-Za-z0-9_.-]{1,64}"}
        pair = sequence(key, const(":"), inner)
        more = {"type": "star", "content": sequence(const(","), pair)}
        whole = sequence(const("{"), _optional(sequence(pair, more)), const("}"))
        if kind == "object" or depth == 0:
            return whole
        return choice(simple, whole, self._list(inner))

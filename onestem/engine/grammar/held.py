"""The schemas that arguments of tools are held to: those of their functions, as far as they are
enforced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from onestem.engine.grammar.keywords import is_enforced, is_of_type, keyword_fault, type_names
from onestem.engine.grammar.schema import check_schema, resolved, subschemas
from onestem.errors import RequestError, UnsupportedError
from onestem.openai.forms.grammar import ANY_OBJECT

Schema = Mapping[str, Any]

_PARTS = frozenset(("$defs", "definitions"))  # that references lead to
_OF_ARRAYS = ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems")
_OF_OBJECTS = (
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
    "unevaluatedProperties", "minProperties", "maxProperties",
)  # fmt: skip


def held_schema(schema: Schema, exact: bool, name: str) -> Schema:
    """The schema that a function's arguments are held to. What is not enforced is left out of it,
    and any object fits where that does not help.

    Args:
        exact: refuse instead.
        name: what errors call it.

    Raises:
        RequestError: it is invalid.
    """
    try:
        schema = _followed(schema, name)
        check_schema(schema, True, name)
    except UnsupportedError as error:
        if exact:
            raise RequestError(f"{error}, or leave out strict") from error
        with suppress(UnsupportedError):
            for _, part in subschemas(schema, name):
                keyword_fault(part, name)
            plain = _plain(schema)
            if plain is not None:
                with suppress(RequestError):  # a reference leads to what was left out
                    check_schema(plain, True, name)
                    return plain
        return ANY_OBJECT
    return schema


def _followed(schema: Schema, name: str) -> Schema:
    """The schema of objects that another is nothing but a reference to, as of a class that has
    members of its own kind: beside the reference, its `type` is not enforced."""
    if schema.keys() - _PARTS != {"type", "$ref"}:
        return schema
    end = resolved(schema, name)
    if end.get("type") != "object" or not end.keys().isdisjoint({"$ref", *_PARTS}):
        return schema
    return {**{key: schema[key] for key in _PARTS & schema.keys()}, **end}


def _plain(schema: Any) -> Any:
    """A schema without what is not enforced; None: no value fits it, as an enum of texts whose type
    is integer."""
    if not isinstance(schema, Mapping):
        return schema
    left = {key: value for key, value in schema.items() if is_enforced(key, value)}
    if "enum" in left and not _keep_values(left):
        return None
    for keyword in ("items", "additionalProperties"):
        if keyword in left:
            left[keyword] = _or_itself(left[keyword])
    for keyword in ("anyOf", "oneOf"):
        if keyword in left:
            left[keyword] = [one for each in left[keyword] if (one := _plain(each)) is not None]
            if not left[keyword]:
                return None
    for keyword in _PARTS:
        if keyword in left:
            left[keyword] = {key: _or_itself(one) for key, one in left[keyword].items()}
    return left if _keep_properties(left) else None


def _or_itself(schema: Any) -> Any:
    plain = _plain(schema)
    return schema if plain is None else plain


def _keep_values(schema: dict[str, Any]) -> bool:
    """Leave out values of an enum that are of another type, and what is said of arrays and objects
    where none of them is one; False: no value is left."""
    names = type_names(schema) or ("string", "number", "object", "array", "boolean", "null")
    values = [one for one in schema["enum"] if any(is_of_type(one, name) for name in names)]
    schema["enum"] = values
    for kind, keywords in ((Sequence, _OF_ARRAYS), (Mapping, _OF_OBJECTS)):
        if not any(isinstance(one, kind) and not isinstance(one, str) for one in values):
            for keyword in keywords:
                schema.pop(keyword, None)
    return bool(values)


def _keep_properties(schema: dict[str, Any]) -> bool:
    """Leave out properties that no value fits, and name those that are required; False: one of
    these has no value."""
    if schema.keys().isdisjoint(("properties", "required")):
        return True
    required, others = schema.get("required", ()), schema.get("additionalProperties", True)
    named = {key: _plain(one) for key, one in schema.get("properties", {}).items()}
    if any(named.get(key, others) in (None, False) for key in required):
        return False
    if None in named.values() and "additionalProperties" in schema and others is not False:
        return True  # left out, it would be any other: the check refuses it as it is
    added = {key: {} if others is True else others for key in required if key not in named}
    if named or added:
        schema["properties"] = {key: one for key, one in named.items() if one is not None} | added
    return True

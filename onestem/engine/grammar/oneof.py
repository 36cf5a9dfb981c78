"""`oneOf`: enforced where its schemas part by a type, by their values or by a property's value."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from onestem.engine.grammar.keywords import is_of_type, same, type_names

__all__ = ["oneof_fault"]

_KINDS = ("string", "number", "object", "array", "boolean", "null")

Schema = Mapping[str, Any]
Resolve = Callable[[Schema], Schema]


def oneof_fault(schema: Schema, resolve: Resolve) -> str | None:
    """What of a schema's `oneOf` is not enforced: a noun for an error.

    Args:
        resolve: follows a schema's `$ref`.
    """
    options = [_resolved(option, resolve) for option in schema.get("oneOf", ())]
    if all(_part(one, other, resolve) for one, other in itertools.combinations(options, 2)):
        return None
    return "a 'oneOf' of schemas that one answer may fit together (say 'anyOf' if it may)"


def _resolved(option: object, resolve: Resolve) -> Schema:
    return resolve(option) if isinstance(option, Mapping) else {}


def _part(one: Schema, other: Schema, resolve: Resolve) -> bool:
    """Whether no value fits both."""
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not any(same(value, each) for value in values for each in others)
    kinds, other_kinds = _kinds(one), _kinds(other)
    if kinds and other_kinds and kinds.isdisjoint(other_kinds):
        return True
    if kinds != {"object"} or other_kinds != {"object"}:
        return False
    return any(
        _part_by_value(one["properties"][name], other["properties"][name], resolve)
        for name in set(one.get("required", ())) & set(other.get("required", ()))
        if name in one.get("properties", {}) and name in other.get("properties", {})
    )


def _part_by_value(one: object, other: object, resolve: Resolve) -> bool:
    values, others = _values(_resolved(one, resolve)), _values(_resolved(other, resolve))
    if values is None or others is None:
        return False
    return not any(same(value, each) for value in values for each in others)


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def _kinds(schema: Schema) -> set[str]:
    """The JSON types of what fits; empty: unknown. An integer is a number."""
    values = _values(schema)
    if values is not None:
        return {name for name in _KINDS for value in values if is_of_type(value, name)}
    names = type_names(schema)
    if not names and ("properties" in schema or "additionalProperties" in schema):
        names = ("object",)
    return {"number" if name == "integer" else name for name in names}

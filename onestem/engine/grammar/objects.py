"""What the compiler enforces of the keywords for objects where they stand beside each other.

Properties are written in the schema's order and each once; those whose names it does not give
(`additionalProperties`, `patternProperties`, `propertyNames`) may come twice, and are not told from
those that another keyword names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["object_fault"]

Schema = Mapping[str, Any]


def object_fault(schema: Schema, strict: bool) -> str | None:
    """What of one schema's keywords for objects is not enforced: a noun for an error."""
    named = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in named]
    if missing:
        return f"a 'required' property that is not among its 'properties' ({missing[0]!r})"
    is_open = _is_open(schema, strict)
    if not strict and schema.get("unevaluatedProperties", True) is not True:
        return "'unevaluatedProperties'"  # in strict mode nothing unnamed is allowed anyway
    if "propertyNames" in schema and ("properties" in schema or "patternProperties" in schema):
        return "'propertyNames' beside 'properties' or 'patternProperties'"
    if "patternProperties" in schema:
        if "properties" in schema:
            return "'patternProperties' beside 'properties'"
        if len(schema["patternProperties"]) > 1:
            return "'patternProperties' with several patterns"
        if is_open:
            return "'patternProperties' where others are allowed ('additionalProperties': false)"
    if schema.get("minProperties", 0) > max(1, len(set(schema.get("required", ())))) and (
        is_open or "patternProperties" in schema or "propertyNames" in schema
    ):
        return "a 'minProperties' above 1 where not all properties are named"
    return None


def _is_open(schema: Schema, strict: bool) -> bool:
    """Whether properties are allowed that no keyword names."""
    given = schema.get("additionalProperties", schema.get("unevaluatedProperties", not strict))
    return given is not False

"""JSON schemas of `response_format`: what is one, and what the grammar compiler enforces.

The compiler ignores keywords that it does not know, and some that it knows where they stand beside
others. An answer that breaks its schema is worse than an error, so all of these are refused here,
and nothing is left for the compiler to warn of.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from onestem.engine.grammar.keywords import (
    is_of_type,
    keyword_fault,
    neighbour_fault,
    num_characters,
    same,
    type_names,
)
from onestem.errors import RequestError, UnsupportedError

__all__ = [
    "SCHEMA",
    "check_schema",
    "ebnf_of",
    "object_fault",
    "oneof_fault",
    "subschemas",
    "unusable",
]


SCHEMA = "response_format.json_schema.schema"
# Compiling takes the cube of the depth: 0.06 s at 64 levels, 8 s at 330.
MOST_DEPTH = 64
# 0.4 s of compiling; values of an enum are cheaper.
MOST_SCHEMAS, MOST_VALUES, MOST_CHARACTERS = 1_000, 5_000, 100_000
# It takes the square of a pattern's written-out length: 0.1 s, and 11 s for ten times as much.
MOST_REPEATED = 1_000
# Models that never saw a schema may write spaces for ever; nobody indents deeper than this.
_MOST_WHITESPACE = 64
# The compiler's rule (0.2.8) for the characters of a string of limited length. It lets raw control
# characters in, which JSON forbids; only literals may have the same text, and never as a rule.
_CHARACTERS = re.compile(r'^(\S+ ::= \(\(\[\^)\\"\\\\\\r\\n(\]\)\))', re.MULTILINE)

_LOG_PREFIX = re.compile(r"^\[[^]]*\] \S+: ")  # time and source line

_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems",
           "unevaluatedProperties")  # fmt: skip
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")

Schema = Mapping[str, Any]


def check_schema(schema: Schema, strict: bool, name: str = SCHEMA) -> None:
    """Refuse a schema that is not valid, or that would not be enforced.

    Strings with a `minLength` or `maxLength` are written without escapes, so without quotes and
    newlines. Formats are enforced as far as a regular expression can: a date may be 31 June.

    Args:
        strict: whether properties that no keyword names are forbidden.
        name: what errors call the schema.

    Raises:
        RequestError: a keyword has a wrong kind of value, or a `$ref` leads nowhere.
        UnsupportedError: the schema is too large, or has what is not enforced.
    """
    found = dict(subschemas(schema, name))
    _bound_size(schema, found, name)
    for part in found.values():
        keyword_fault(part, name)
    names = {id(part.get("propertyNames")) for part in found.values()}
    references = _References(found, name)
    for part in found.values():
        reason = (
            neighbour_fault(part, in_names=id(part) in names)
            or object_fault(part, strict)
            or references.fault(part)
            or oneof_fault(part, references.resolve)
        )
        if reason is not None:
            raise UnsupportedError(f"{name} has {reason}, which is not enforced: leave it out")


def subschemas(schema: Schema, name: str = SCHEMA) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """A schema and all inside it, each with its path; values (`enum`, `default`, ...) are not
    schemas.

    Raises:
        UnsupportedError: too many, or too deep.
    """
    left: list[tuple[tuple[str, ...], int, Schema]] = [((), 1, schema)]
    count = 0
    while left:
        path, depth, part = left.pop()
        count += 1
        if depth > MOST_DEPTH:
            raise UnsupportedError(
                f"{name} is nested more than {MOST_DEPTH} levels deep, which is the limit: "
                "make it flatter, or put parts into $defs"
            )
        if count > MOST_SCHEMAS:
            raise _too_large(name, f"more than {MOST_SCHEMAS:,} schemas in it")
        yield path, part
        left += [((*path, *steps), depth + 1, inner) for steps, inner in _inside(part)]


def _inside(schema: Schema) -> Iterator[tuple[tuple[str, ...], Schema]]:
    for keyword in _SINGLE:
        yield from _if_schema((keyword,), schema.get(keyword))
    for keyword in _LISTS:
        listed = schema.get(keyword)
        for index, part in enumerate(listed if isinstance(listed, list) else ()):
            yield from _if_schema((keyword, str(index)), part)
    for keyword in _MAPS:
        named = schema.get(keyword)
        for name, part in named.items() if isinstance(named, Mapping) else ():
            yield from _if_schema((keyword, str(name)), part)


def _if_schema(path: tuple[str, ...], part: object) -> Iterator[tuple[tuple[str, ...], Schema]]:
    if isinstance(part, Mapping):
        yield path, part


def _too_large(name: str, reason: str) -> UnsupportedError:
    return UnsupportedError(f"{name} has {reason}, which is the limit: make it smaller")


def _bound_size(schema: Schema, found: Mapping[tuple[str, ...], Schema], name: str) -> None:
    values = sum(len(e) for part in found.values() if isinstance(e := part.get("enum"), list))
    if values > MOST_VALUES:
        raise _too_large(name, f"{values:,} values in enums, more than {MOST_VALUES:,}")
    try:
        length = len(json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}") from error
    if length > MOST_CHARACTERS:
        raise _too_large(name, f"{length:,} characters, more than {MOST_CHARACTERS:,}")
    for part in found.values():
        if any(num_characters(pattern) > MOST_REPEATED for pattern in _patterns(part)):
            raise _too_large(
                name,
                f"a pattern of more than {MOST_REPEATED:,} characters, its repetitions written out",
            )


def _patterns(schema: Schema) -> Iterator[str]:
    named = schema.get("patternProperties")
    given = (schema.get("pattern"), *(named if isinstance(named, Mapping) else ()))
    return (pattern for pattern in given if isinstance(pattern, str))


def ebnf_of(
    schema: Schema,
    *,
    strict: bool,
    any_whitespace: bool = False,
    spaced: bool = False,
    name: str = SCHEMA,
) -> str:
    """A checked schema's JSON as a grammar.

    Args:
        strict: no properties and items that no keyword names.
        any_whitespace: allow any between values; else there is none, or what `spaced` says.
        spaced: a space after each comma and colon, as `json.dumps` writes.
        name: what errors call the schema.

    Raises:
        RequestError: xgrammar refuses it.
    """
    import xgrammar

    separators = (", ", ": ") if spaced else (",", ":")
    try:
        grammar = xgrammar.Grammar.from_json_schema(
            json.dumps(_with_any_of(schema)),
            any_whitespace=any_whitespace,
            separators=None if any_whitespace else separators,
            max_whitespace_cnt=_MOST_WHITESPACE if any_whitespace else None,
            strict_mode=strict,
        )
    except Exception as error:  # it raises many kinds for a bad schema
        raise unusable(name, str(error)) from error
    return _CHARACTERS.sub(r'\1\\0-\\x1f\\"\\\\\2', str(grammar))


def unusable(name: str, reason: str) -> RequestError:
    """What xgrammar says of a schema or a tag that it refuses, as an error of one line."""
    last = (reason.strip().splitlines() or ["it is refused"])[-1]
    return RequestError(f"{name} cannot be used: {_LOG_PREFIX.sub('', last)}")


def _with_any_of(schema: Schema) -> dict[str, Any]:
    """A copy with `anyOf` for each `oneOf`: no value fits two of its schemas (`check_schema` sees
    to it), but the compiler cannot prove that, and would warn."""
    copied: dict[str, Any] = json.loads(json.dumps(schema))
    for _, part in list(subschemas(copied)):
        if "oneOf" in part:
            assert isinstance(part, dict)
            part["anyOf"] = part.pop("oneOf")
    _unescape_references(copied)
    return copied


def _unescape_references(schema: dict[str, Any]) -> None:
    """Lead references with escapes to definitions whose names need none: the compiler reads no
    escapes."""
    found, names = dict(subschemas(schema)), dict[tuple[str, ...], str]()
    for part in found.values():
        uri = part.get("$ref")
        if not isinstance(uri, str) or (path := _steps(uri)) not in found:
            continue
        if path != tuple(uri[2:].split("/")) and path:
            assert isinstance(part, dict)
            part["$ref"] = f"#/$defs/{names.setdefault(path, f'escaped reference {len(names)}')}"
    if names:
        schema["$defs"] = {**schema.get("$defs", {}), **{n: found[p] for p, n in names.items()}}


class _References:
    """Where the references of a schema lead."""

    def __init__(self, found: Mapping[tuple[str, ...], Schema], name: str) -> None:
        self._found = found
        self._name = name

    def fault(self, schema: Schema) -> str | None:
        """Why a schema's reference is not followed; None: it is."""
        uri = schema.get("$ref")
        if uri is None:
            return None
        if not uri.startswith("#"):
            return f"a reference to another document ({uri})"
        if uri != "#" and not uri.startswith("#/"):
            return f"a reference by an anchor ({uri})"
        if self._target(uri) is None:
            raise RequestError(
                f"{self._name} cannot be used: $ref {uri!r} leads to no schema in it"
            )
        self.resolve(schema)
        return None

    def _target(self, uri: str) -> Schema | None:
        return self._found.get(_steps(uri))

    def resolve(self, schema: Schema) -> Schema:
        """The schema that a reference, or a chain of them, leads to.

        Raises:
            RequestError: it leads to itself.
        """
        passed = []
        while isinstance(uri := schema.get("$ref"), str) and (to := self._target(uri)) is not None:
            if uri in passed:
                raise RequestError(f"{self._name} cannot be used: $ref {uri!r} leads to itself")
            passed.append(uri)
            schema = to
        return schema


def _steps(uri: str) -> tuple[str, ...]:
    """The path that a JSON pointer in a URI writes (RFC 6901)."""
    parts = uri[2:].split("/") if len(uri) > 1 else []
    return tuple(unquote(part).replace("~1", "/").replace("~0", "~") for part in parts)


def object_fault(schema: Schema, strict: bool) -> str | None:
    """What of one schema's keywords for objects is not enforced: a noun for an error.

    Properties are written in the schema's order and each once. Those whose names it does not give
    (`additionalProperties`, `patternProperties`, `propertyNames`) may come twice, and are not
    distinguished from those that another keyword names.
    """
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


_KINDS = ("string", "number", "object", "array", "boolean", "null")

Resolve = Callable[[Schema], Schema]


def oneof_fault(schema: Schema, resolve: Resolve) -> str | None:
    """What of a schema's `oneOf` is not enforced: a noun for an error. It is enforced where its
    schemas differ in type, in values or in a property's value.

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

"""JSON schemas of `response_format`: what is one, and what the grammar compiler enforces.

The compiler ignores keywords that it does not know, and some that it knows where others are beside
them. An answer that breaks its schema is worse than an error, so all of these are refused here,
and nothing is left for the compiler to warn of.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from onestem.engine.grammar.keywords import (
    is_of_type,
    keyword_fault,
    neighbour_fault,
    num_characters,
    type_names,
)
from onestem.errors import RequestError, UnsupportedError

SCHEMA = "response_format.json_schema.schema"
# Compiling takes the cube of the depth: 0.06 s at 64 levels, 8 s at 330.
MOST_DEPTH = 64
# 0.4 s of compiling; values of an enum are cheaper.
MOST_SCHEMAS, MOST_VALUES, MOST_CHARACTERS = 1_000, 5_000, 100_000
# It takes the square of a pattern's written-out length: 0.1 s, and 11 s for ten times as much.
MOST_REPEATED = 1_000
_LOG_PREFIX = re.compile(r"^\[[^]]*\] \S+: ")  # time and source line

_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems",
           "unevaluatedProperties")  # fmt: skip
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")

Schema = Mapping[str, Any]


def check_schema(schema: Schema, strict: bool, name: str = SCHEMA) -> None:
    """Refuse a schema that is not valid, or that would not be enforced.

    Strings with a `minLength` or `maxLength` are written without hexadecimal escapes. Formats are
    enforced as far as a regular expression can: a date may be 31 June.

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


def unusable(name: str, reason: str) -> RequestError:
    """What xgrammar says of a schema or a tag that it refuses, as an error of one line."""
    last = (reason.strip().splitlines() or ["it is refused"])[-1]
    return RequestError(f"{name} cannot be used: {_LOG_PREFIX.sub('', last)}")


def unescape_references(schema: dict[str, Any]) -> None:
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


def resolved(schema: Schema, name: str) -> Schema:
    """Where a schema's reference leads; errors as of `check_schema`."""
    return _References(dict(subschemas(schema, name)), name).resolve(schema)


class _References:
    """Where the references of a schema lead."""

    def __init__(self, found: Mapping[tuple[str, ...], Schema], name: str) -> None:
        self._found = found
        self._name = name
        self._ends: dict[str, Schema] = {}

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
        passed: dict[str, None] = {}
        while isinstance(uri := schema.get("$ref"), str):
            if uri in passed:
                raise RequestError(f"{self._name} cannot be used: $ref {uri!r} leads to itself")
            passed[uri] = None
            to = self._ends.get(uri) or self._target(uri)
            if to is None:
                break
            schema = to
        for uri in passed:  # no part of a chain is followed twice
            self._ends[uri] = schema
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
    options = [_option(_resolved(option, resolve), resolve) for option in schema.get("oneOf", ())]
    valued = [one.values for one in options if one.values is not None]
    others = [one for one in options if one.values is None]
    if (
        sum(map(len, valued)) == len(frozenset().union(*valued))
        and all(itertools.starmap(_part, itertools.combinations(others, 2)))
        and all(
            one.kinds and one.kinds.isdisjoint(two.kinds)
            for one in others
            for two in options
            if two.values is not None
        )
    ):
        return None
    return "a 'oneOf' of schemas that one answer may fit together (say 'anyOf' if it may)"


class _Option(NamedTuple):
    """What tells a schema of a `oneOf` from the others. `tags`: values of properties that an object
    must have."""

    values: frozenset[Any] | None
    kinds: frozenset[str]
    tags: dict[str, frozenset[Any]]


def _option(schema: Schema, resolve: Resolve) -> _Option:
    named = schema.get("properties", {})
    tags = {}
    for name in schema.get("required", ()):
        values = _values(_resolved(named.get(name), resolve))
        if values is not None:
            tags[name] = _frozen_set(values)
    values = _values(schema)
    return _Option(None if values is None else _frozen_set(values), frozenset(_kinds(schema)), tags)


def _resolved(option: object, resolve: Resolve) -> Schema:
    return resolve(option) if isinstance(option, Mapping) else {}


def _part(one: _Option, other: _Option) -> bool:
    """Whether no value fits both, which have no values of their own."""
    if one.kinds and other.kinds and one.kinds.isdisjoint(other.kinds):
        return True
    if one.kinds != {"object"} or other.kinds != {"object"}:
        return False
    return any(one.tags[name].isdisjoint(other.tags[name]) for name in one.tags.keys() & other.tags)


def _frozen_set(values: Iterable[Any]) -> frozenset[Any]:
    return frozenset(map(_frozen, values))


def _frozen(value: Any) -> Any:
    """A JSON value as a member of a set: equal ones are equal, and true is not 1."""
    if isinstance(value, Mapping):
        return frozenset((key, _frozen(inner)) for key, inner in value.items())
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return (bool, value) if isinstance(value, bool) else value


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

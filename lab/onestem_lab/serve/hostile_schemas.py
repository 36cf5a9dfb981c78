"""JSON schemas that take the compiler long and keep to the documented limits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["COSTLY_SCHEMAS", "costly_schema", "format_of", "small_schema"]

Json = dict[str, Any]
Maker = Callable[[random.Random], Json]

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def format_of(schema: Json) -> Json:
    """A `response_format` of it."""
    return {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}


def small_schema(number: int) -> Json:
    """Distinct for each number, so that nobody has compiled it before; `fits` in
    `hostile_probes` knows its answers."""
    return _object({f"k{number}": {"enum": ["a", "b"]}})


def _object(properties: Mapping[str, Json]) -> Json:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def _word(rng: random.Random, length: int = 8) -> str:
    return "".join(rng.choices(LETTERS, k=length))


def _objects_of(rng: random.Random, count: int, value: Maker) -> Json:
    return _object({f"{_word(rng)}{i}": value(rng) for i in range(count)})


def _bounded_string(rng: random.Random) -> Json:
    return {"type": "string", "maxLength": rng.choice([100, 200, 500, 1000, 2000])}


def _strings(rng: random.Random) -> Json:
    """Ten to hundreds of strings of limited length."""
    return _objects_of(rng, rng.choice([10, 30, 100, 300]), _bounded_string)


def _alternatives(rng: random.Random) -> Json:
    """Alternatives inside alternatives, all of which begin alike."""
    schema: Json = _bounded_string(rng)
    for _ in range(rng.choice([5, 10, 15])):
        deeper = _object({"kind": {"const": _word(rng)}, "of": schema})
        others = [_object({_word(rng): _bounded_string(rng)}) for _ in range(rng.randint(2, 9))]
        schema = {"anyOf": [deeper, *others]}
    return _object({"all": schema})


def _pattern(rng: random.Random) -> Json:
    pattern = rng.choice(
        [
            "([a-z]+ ?){1,60}[0-9]{1,40}",
            "(a|b|ab){1,90}c",
            "[A-Za-z0-9]{200,400}",
            "((x|y)(y|z)?){20,80}",
        ]
    )
    return {"type": "string", "pattern": f"{_word(rng, 3)}{pattern}"}


def _patterns(rng: random.Random) -> Json:
    return _objects_of(rng, rng.choice([5, 20, 80]), _pattern)


def _enums(rng: random.Random) -> Json:
    """Thousands of values."""
    count = rng.choice([500, 2000, 4500])
    values = [f"{_word(rng, rng.randint(1, 9))}{i}" for i in range(count)]
    cut = rng.randrange(1, count)
    return _object({"one": {"enum": values[:cut]}, "other": {"enum": values[cut:]}})


def _references(rng: random.Random) -> Json:
    """A chain of definitions, each of which may be the next twice."""
    count = rng.choice([20, 60, 150])
    names = [f"{_word(rng)}{i}" for i in range(count)]
    definitions: Json = {names[-1]: _bounded_string(rng)}
    for name, following in itertools.pairwise(names):
        ref = {"$ref": f"#/$defs/{following}"}
        definitions[name] = {"anyOf": [_object({"a": ref, "b": ref}), _bounded_string(rng)]}
    return {"$defs": definitions, **_object({"first": {"$ref": f"#/$defs/{names[0]}"}})}


def _bounded_number(rng: random.Random) -> Json:
    low, high = sorted(round(rng.uniform(-1e6, 1e6), 6) for _ in range(2))
    return {"type": "number", "minimum": low, "maximum": high}


def _numbers(rng: random.Random) -> Json:
    return _objects_of(rng, rng.choice([20, 100, 250]), _bounded_number)


def _lists(rng: random.Random) -> Json:
    """Lists of strings of limited length, with many or few elements."""

    def some(rng: random.Random) -> Json:
        most = rng.choice([10, 100, 400])
        return {"type": "array", "items": _bounded_string(rng), "minItems": 1, "maxItems": most}

    return _objects_of(rng, rng.choice([3, 10, 30]), some)


def _mixed(rng: random.Random) -> Json:
    makers = [_bounded_string, _pattern, _bounded_number]
    return _objects_of(rng, rng.choice([40, 150]), lambda rng: rng.choice(makers)(rng))


COSTLY_SCHEMAS: Mapping[str, Maker] = {
    "strings": _strings,
    "alternatives": _alternatives,
    "patterns": _patterns,
    "enums": _enums,
    "references": _references,
    "numbers": _numbers,
    "lists": _lists,
    "mixed": _mixed,
}


def costly_schema(rng: random.Random) -> Json:
    """Any of them; new with nearly each draw."""
    return rng.choice(list(COSTLY_SCHEMAS.values()))(rng)

"""Structural tags: what an answer is held to where a JSON schema alone does not say it.

A format is xgrammar's (`structural_tag.Format`): texts, schemas, regular expressions and grammars,
put together. Schemas in it are written without whitespace between their values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from onestem.engine.grammar.keywords import num_characters, regex_fault
from onestem.engine.grammar.schema import MOST_CHARACTERS, MOST_REPEATED, check_schema, ebnf_of
from onestem.errors import RequestError, UnsupportedError

__all__ = ["check_tags", "tags_of", "with_grammars"]

Format = Mapping[str, Any]

# Compiling takes the cube of the number of rules, and more where they are ambiguous: 1.5 s for 50.
MOST_RULES = 50
# Each repeated or optional part multiplies the places where a parser may stand, and all of them are
# looked at for the first mask: 60 of them take seconds.
MOST_REPEATS = {"regex": 24, "grammar": 64}
MOST_LETTERS = {"regex": 1_000, "grammar": 5_000}


def tags_of(response_format: Mapping[str, Any]) -> dict[str, Any] | None:
    """The structural tag of a format that is no JSON schema; None: it is one."""
    kind = response_format["type"]
    if kind == "regex":
        return {"type": "regex", "pattern": response_format["regex"]}
    if kind == "grammar":
        return {"type": "grammar", "grammar": response_format["grammar"]}
    if kind == "choice":
        values = response_format["choice"]
        return {"type": "or", "elements": [_text(value) for value in values]}
    return dict(response_format["format"]) if kind == "structural_tag" else None


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def check_tags(tags: Format) -> None:
    """Refuse what an answer would not be held to, or what takes long to compile.

    Raises:
        RequestError, UnsupportedError: a schema in it is none, or not enforced; it is too large.
    """
    for one in _formats(tags):
        schema = one.get("json_schema")
        if isinstance(schema, Mapping) and not one.get("lenient"):
            check_schema(schema, True)
        if isinstance(one.get("pattern"), str):
            _check_regex(one["pattern"])
        if isinstance(one.get("grammar"), str):
            _check_grammar(one["grammar"])
    size = len(json.dumps(tags))
    if size > 2 * MOST_CHARACTERS:
        raise UnsupportedError(
            f"response_format has {size} characters, limit is {2 * MOST_CHARACTERS}: shorten it"
        )


def _check_regex(pattern: str) -> None:
    _check_size("regex", pattern)
    fault = regex_fault(pattern)
    if fault is not None:
        raise UnsupportedError(f"regex has {fault}, which is not enforced: leave it out")
    if num_characters(pattern) > MOST_REPEATED:
        raise UnsupportedError(
            f"a regex spells out more than {MOST_REPEATED} characters: repeat less in it"
        )


def _check_grammar(grammar: str) -> None:
    _check_size("grammar", grammar)
    rules = grammar.count("::=")
    if rules > MOST_RULES:
        raise UnsupportedError(f"a grammar has {rules} rules, limit is {MOST_RULES}: use fewer")


def _check_size(what: str, text: str) -> None:
    repeats = sum(map(text.count, "?*+{"))
    for count, limit, things in (
        (len(text), MOST_LETTERS[what], "characters"),
        (repeats, MOST_REPEATS[what], "repeated or optional parts"),
    ):
        if count > limit:
            raise UnsupportedError(f"{what} has {count} {things}, limit is {limit}: simplify it")


def _formats(value: Any) -> Iterator[Mapping[str, Any]]:
    """All objects of a tag, but for what is inside its schemas."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            yield one
            waiting.extend(part for name, part in one.items() if name != "json_schema")
        elif isinstance(one, (list, tuple)):
            waiting.extend(one)


def with_grammars(value: Any) -> Any:
    """A tag with its plain schemas as grammars, which the compiler writes without whitespace."""
    if isinstance(value, Mapping):
        schema = value.get("json_schema")
        if value.get("type") == "json_schema" and isinstance(schema, Mapping):
            if value.get("style", "json") != "json":
                return dict(value)
            if value.get("lenient") and not _is_enforced(schema):
                return {"type": "grammar", "grammar": ebnf_of({"type": "object"}, strict=False)}
            return {"type": "grammar", "grammar": ebnf_of(schema, strict=True)}
        return {name: with_grammars(part) for name, part in value.items()}
    return [with_grammars(part) for part in value] if isinstance(value, (list, tuple)) else value


def _is_enforced(schema: Mapping[str, Any]) -> bool:
    """Whether an answer would be held to it."""
    try:
        check_schema(schema, True)
    except (RequestError, UnsupportedError):
        return False
    return True

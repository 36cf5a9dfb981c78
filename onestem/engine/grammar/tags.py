"""Structural tags: constraints on an answer that a JSON schema alone does not express.

A format is xgrammar's (`structural_tag.Format`): texts, schemas, regular expressions and grammars,
put together. Schemas in it may say what `whitespace` is between their values; their `name` is what
errors call them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from onestem.engine.grammar.keywords import regex_fault
from onestem.engine.grammar.schema import MOST_CHARACTERS, check_schema
from onestem.errors import RequestError, UnsupportedError
from onestem.request import MAX_DEPTH, Whitespace, is_deep

Format = Mapping[str, Any]

# Fields of each type (xgrammar 0.2.8). Others are refused here: properties in any order may come
# twice, and `whitespace` says what there is of it.
FIELDS: Mapping[str, frozenset[str]] = {
    "any_text": frozenset(("excludes", "max_tokens", "max_chars")),
    "any_tokens": frozenset(("exclude_tokens", "max_tokens")),
    "const_string": frozenset(("value",)),
    "dispatch": frozenset(("rules", "loop", "excludes")),
    "exclude_token": frozenset(("exclude_tokens",)),
    "grammar": frozenset(("grammar",)),
    "json_schema": frozenset(("json_schema", "style", "whitespace", "name")),
    "optional": frozenset(("content",)),
    "or": frozenset(("elements",)),
    "plus": frozenset(("content",)),
    "qwen_xml_parameter": frozenset(("json_schema",)),
    "regex": frozenset(("pattern",)),
    "repeat": frozenset(("min", "max", "content")),
    "sequence": frozenset(("elements",)),
    "star": frozenset(("content",)),
    "tag": frozenset(("begin", "content", "end")),
    "tags_with_separator": frozenset(("tags", "separator", "at_least_one", "stop_after_first")),
    "token": frozenset(("token",)),
    "token_dispatch": frozenset(("rules", "loop", "exclude_tokens")),
    "token_triggered_tags": frozenset(
        ("trigger_tokens", "tags", "exclude_tokens", "at_least_one", "stop_after_first")
    ),
    "triggered_tags": frozenset(
        ("triggers", "tags", "at_least_one", "stop_after_first", "excludes")
    ),
}
_CHOICES = ("or", "triggered_tags", "token_triggered_tags", "tags_with_separator")
_MOST_CHOICES, _MANY = 4, 1_000


def tags_of(response_format: Mapping[str, Any]) -> dict[str, Any] | None:
    """The structural tag of a format that is not a JSON schema; None: it is one."""
    kind = response_format["type"]
    if kind == "regex":
        return {"type": "regex", "pattern": response_format["regex"]}
    if kind == "grammar":
        return {"type": "grammar", "grammar": response_format["grammar"]}
    if kind == "choice":
        texts = [{"type": "const_string", "value": text} for text in response_format["choice"]]
        return {"type": "or", "elements": texts}
    if kind != "structural_tag":
        return None
    given = response_format.get("format")
    return _older(response_format) if given is None else dict(given)


def _older(response_format: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's older form, as xgrammar reads it."""
    tags = [
        {
            "type": "tag",
            "begin": one["begin"],
            "content": {
                "type": "json_schema",
                "json_schema": one["schema"],
                "name": f"response_format.structures[{place}].schema",
            },
            "end": one["end"],
        }
        for place, one in enumerate(response_format["structures"])
    ]
    return {"type": "triggered_tags", "triggers": response_format["triggers"], "tags": tags}


def check_depth(tags: Format) -> None:
    """Refuse a tag (`RequestError`) that others could not walk through."""
    if is_deep(tags):
        raise RequestError(f"response_format nests too deeply, limit is {MAX_DEPTH} levels")


def check_tags(tags: Format) -> None:
    """Refuse a tag that is not valid, or that would not be enforced.

    Raises:
        RequestError: a type or a field of it is unknown, or a schema in it is not valid.
        UnsupportedError: something in it is not enforced, or it is too large.
    """
    check_depth(tags)
    size = len(json.dumps(tags))
    if size > 2 * MOST_CHARACTERS:
        raise UnsupportedError(
            f"response_format has {size} characters, limit is {2 * MOST_CHARACTERS}: shorten it"
        )
    for path, one in _formats("response_format.format", tags):
        _check_fields(path, one)
        schema = one.get("json_schema")
        if isinstance(schema, Mapping):
            check_schema(schema, True, one.get("name", f"{path}.json_schema"))
        fault = regex_fault(one["pattern"]) if isinstance(one.get("pattern"), str) else None
        if fault is not None:
            raise UnsupportedError(f"regex has {fault}, which is not enforced: leave it out")


def _check_fields(path: str, one: Format) -> None:
    kind = one.get("type")
    fields = FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise RequestError(f"{path}.type is {kind!r:.80}, expected one of {', '.join(FIELDS)}")
    unknown = sorted(map(str, one.keys() - fields - {"type"}))
    if unknown:
        raise RequestError(
            f"{path} of type {kind} has {unknown[0]!r:.80}, which is not honoured: leave it out"
        )
    if not isinstance(one.get("name", ""), str):
        raise RequestError(f"{path}.name is {one['name']!r:.80}, expected text")
    whitespace = one.get("whitespace")
    if "whitespace" in one and whitespace not in get_args(Whitespace):
        expected = ", ".join(get_args(Whitespace))
        raise RequestError(f"{path}.whitespace is {whitespace!r:.80}, expected one of {expected}")
    if whitespace is not None and one.get("style", "json") != "json":
        raise RequestError(f"{path}.whitespace is not honoured beside a style: leave it out")


def _formats(path: str, value: Any) -> Iterator[tuple[str, Format]]:
    """All formats of a tag, each with its path; there are none inside schemas."""
    waiting = [(path, value)]
    while waiting:
        path, one = waiting.pop()
        if isinstance(one, Mapping):
            yield path, one
            waiting += [(f"{path}.{name}", p) for name, p in one.items() if name != "json_schema"]
        elif isinstance(one, (list, tuple)):
            waiting += [(f"{path}[{index}]", part) for index, part in enumerate(one)]


def is_simple(tag: object) -> bool:
    """Whether compiling a tag costs little more than compiling its schemas: no repeated part may be
    empty, and at most one part of a sequence leaves a choice."""
    return _choices(tag) <= _MOST_CHOICES


def _choices(tag: object) -> int:
    """How many choices are nested; `_MANY`: the tag is not simple."""
    kind = tag.get("type") if isinstance(tag, Mapping) else None
    if not isinstance(tag, Mapping) or not isinstance(kind, str):
        return _MANY
    if kind == "json_schema":
        return 0 if tag.get("style", "json") == "json" else _MANY
    if kind in ("const_string", "token"):
        return 0 if tag.get("value", "token" in tag) else _MANY
    if kind == "tag":
        return _choices(tag.get("content")) if tag.get("begin") else _MANY
    parts = tag.get("elements", tag.get("tags"))
    if not isinstance(parts, (list, tuple)):
        return _MANY
    inside = list(map(_choices, parts))
    if kind == "sequence":
        return max(inside, default=_MANY) if sum(map(bool, inside)) <= 1 else _MANY
    return 1 + max(inside, default=_MANY) if kind in _CHOICES else _MANY


def changed(value: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """A tag with all formats of it changed, from the inside out; there are none inside schemas."""
    if isinstance(value, (list, tuple)):
        return [changed(part, change) for part in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("type") == "json_schema":
        return change(dict(value))
    return change({name: changed(part, change) for name, part in value.items()})


def with_token_ids(value: Any, control_token: Callable[[str], int | None]) -> Any:
    """A tag with control tokens as ids.

    Args:
        control_token: the id of a control token; None: the text is not one.
    """

    def token(one: Any) -> Any:
        known = control_token(one) if isinstance(one, str) else None
        return one if known is None else known

    def change(made: dict[str, Any]) -> dict[str, Any]:
        if made.get("type") == "token":
            made["token"] = token(made.get("token"))
        for name in ("trigger_tokens", "exclude_tokens"):
            if isinstance(made.get(name), list):
                made[name] = list(map(token, made[name]))
        if made.get("type") == "token_dispatch" and isinstance(made.get("rules"), list):
            made["rules"] = [
                [token(rule[0]), *rule[1:]] if isinstance(rule, list) and rule else rule
                for rule in made["rules"]
            ]
        return made

    return changed(value, change)


def named_tokens(tag: Any) -> set[int]:
    """Ids of the tokens that a tag of `with_token_ids` names."""
    found: list[Any] = []
    for _, one in _formats("", tag):
        found.append(one.get("token"))
        found += one.get("trigger_tokens") or ()
        if one.get("type") == "token_dispatch":
            found += [rule[0] for rule in one.get("rules") or () if isinstance(rule, list) and rule]
    return {token for token in found if isinstance(token, int)}

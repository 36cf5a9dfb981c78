"""JSON schemas as grammars in EBNF, in the process that compiles them.

The compiler's own grammar is taken, but for strings of limited length: there it has a state for
each character, and the mask of a state takes 20 ms where the vocabulary is large. Here a limit is a
budget of characters, which is one state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from onestem.engine.grammar.schema import SCHEMA, subschemas, unescape_references
from onestem.engine.grammar.tags import changed

# Up to here a string's limit is a rule for each character: its masks are quicker than a budget's,
# which has to try each token that is longer than what is left.
SHORT = 16
# Models that never saw a schema may write spaces for ever; nobody indents deeper than this.
_MOST_WHITESPACE = 64
_SEPARATORS = {"spaced": (", ", ": "), "compact": (",", ":")}
# The compiler's rules (0.2.8) for values that no schema names: they always have this comma.
_COMMA = re.compile(r'^(basic_(?:array_items|object_properties) ::= \(\()", "', re.MULTILINE)
# Its exponents have any number of digits, and programs read 1e999 as infinity.
_EXPONENT = re.compile(r"(\[eE\] \w+ \w+\{1, )-1\}")
# The compiler's rule (0.2.8) for the characters of a string of limited length. It lets raw control
# characters in, which JSON forbids, and no escapes, which models write for line breaks and quotes;
# only literals may have the same text, and never as a rule.
_RULE = re.compile(r'^(\S+) ::= \(\(\[\^\\"\\\\\\r\\n\]\)\)', re.MULTILINE)
_PLAIN = r"[^\0-\x1f\"\\]"
# Not \uD83D, which is half of a character: that may be written as it is.
_ESCAPE = r'"\\" [\"\\/bfnrt]'
# Literals and classes of characters are passed over: they may have any text.
_USE = re.compile(
    r'"(?:[^"\\]|\\.)*+"|\[(?:[^\]\\]|\\.)*+\]'
    r'|(?P<rule>\w++)\{(?P<least>\d++), (?P<most>-?\d++)\} "\\""'
)
_QUOTED = re.compile(rb'"((?:[^\x00-\x1f"\\]|\\["\\/bfnrt])*+\\?)')
_OPENING = frozenset(b":,[{ \n\r\t")  # what precedes a value in JSON


class Refused(Exception):
    """The compiler refuses a schema. Its arguments: the schema's name, and what is said of it."""


def ebnf_of(
    native: Any,
    schema: Mapping[str, Any],
    *,
    strict: bool,
    short: int,
    whitespace: str = "spaced",
    name: str = SCHEMA,
) -> str:
    """A checked schema's JSON as a grammar.

    Args:
        native: xgrammar's native part.
        strict: no properties and items that no keyword names.
        short: longest string whose limit is no budget, at least `longest_entry`.
        whitespace: between values (`request.Whitespace`).
        name: what errors call the schema.

    Raises:
        Refused: xgrammar refuses it.
    """
    is_any = whitespace == "any"
    try:
        grammar = native.Grammar.from_json_schema(
            json.dumps(_for_compiler(schema)),
            is_any,
            None,
            None if is_any else _SEPARATORS[whitespace],
            strict,
            _MOST_WHITESPACE if is_any else None,
            False,
            False,
        )
    except Exception as error:  # it raises many kinds for a bad schema
        raise Refused(name, str(error)) from error
    text = _EXPONENT.sub(r"\g<1>2}", str(grammar.to_string()))
    if whitespace == "compact":
        text = _COMMA.sub(r'\1","', text)
    return _with_budgets(text, short)


def _for_compiler(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which the compiler reads what is meant.

    * `anyOf` for each `oneOf`: no value fits two of its schemas (`check_schema` sees to it), but it
      cannot prove that, and would warn.
    * Objects and lists that are values have schemas: it writes values as compact texts.
    """
    copied: dict[str, Any] = json.loads(json.dumps(schema))
    for _, part in list(subschemas(copied)):
        assert isinstance(part, dict)
        if "oneOf" in part:
            part["anyOf"] = part.pop("oneOf")
        values = [part["const"]] if "const" in part else part.get("enum", [])
        if any(isinstance(value, (dict, list)) for value in values):
            for keyword in ("type", "const", "enum"):
                part.pop(keyword, None)
            part["anyOf"] = list(map(_of_value, values))
    unescape_references(copied)
    return copied


def _of_value(value: Any) -> dict[str, Any]:
    """A schema that a JSON value alone fits."""
    if isinstance(value, dict):
        named = {name: _of_value(part) for name, part in value.items()}
        return {
            "type": "object",
            "properties": named,
            "required": list(named),
            "additionalProperties": False,
        }
    if isinstance(value, list):
        items = list(map(_of_value, value))
        return {"type": "array", **({"prefixItems": items} if items else {}), "items": False,
                "minItems": len(items), "maxItems": len(items)}  # fmt: skip
    return {"const": value}


def _with_budgets(grammar: str, short: int) -> str:
    """A grammar with other rules for strings of limited length."""
    limited = frozenset(_RULE.findall(grammar))
    if not limited:
        return grammar
    prefix = "limited"
    while prefix in grammar:
        prefix += "_"
    tails = _Tails(prefix, short)

    def replaced(use: re.Match[str]) -> str:
        if use["rule"] not in limited:
            return use[0]
        return tails.of(int(use["least"]), int(use["most"]))

    grammar = _RULE.sub(lambda rule: f"{rule[1]} ::= (({_PLAIN}))", grammar)
    return _USE.sub(replaced, grammar) + "".join(f"\n{rule}" for rule in tails.rules.values())


class _Tails:
    """Rules for what follows a string's opening quote. Attributes: `rules`: by their names."""

    def __init__(self, prefix: str, short: int) -> None:
        self._character = f"{prefix}_character"
        self.rules = {self._character: f"{self._character} ::= {_PLAIN} | {_ESCAPE}"}
        self._prefix = prefix
        self._short = short

    def of(self, least: int, most: int) -> str:
        """Characters from `least` to `most` (-1: any number), and the closing quote."""
        one = self._character
        # Masks of several characters that may be escapes, where all have to come, take long.
        first = f"{one} " if least == 1 else f"{_PLAIN}{{{least}}} " * (least > 1)
        if most < 0:
            return rf'{first}{one}* "\""'
        if most - least <= self._short:
            return first + self._chain(most - least)
        # The budget is of all characters: the compiler reads over one that begins inside a token.
        # An escape counts as two of it; one at its end may be finished.
        name = f"{self._prefix}_{least}_{most}"
        self.rules[name] = f"{name}[max_chars={most}] ::= {first}{one}*"
        return rf'{name} "\""'

    def _chain(self, most: int) -> str:
        """The rule for a number of characters or fewer, and the quote; it goes on with the next."""
        for left in range(most + 1):
            name = f"{self._prefix}_{left}"
            further = rf" | {self._character} {self._prefix}_{left - 1}" if left else ""
            self.rules[name] = rf'{name} ::= "\""{further}'
        return f"{self._prefix}_{most}"


def longest_entry(tokens: Iterable[bytes], *, in_json: bool) -> int:
    """The most characters that follow a quote within a token: where a budget is smaller, a token
    that opens a string could exceed it unseen.

    Args:
        in_json: the quote is where a value of JSON begins.
    """
    longest = 0
    for token in tokens:
        for found in _QUOTED.finditer(token):
            before = token[: found.start()]
            if not in_json or not before or before[-1] in _OPENING:
                longest = max(longest, sum(byte & 0xC0 != 0x80 for byte in found[1]))
    return longest


def with_grammars(native: Any, value: Any, short: int) -> Any:
    """A structural tag with a grammar for each plain JSON schema in it.

    Args:
        native, short: see `ebnf_of`.

    Raises:
        Refused: xgrammar refuses a schema.
    """

    def change(one: dict[str, Any]) -> dict[str, Any]:
        schema = one.get("json_schema")
        if one.get("type") != "json_schema" or not isinstance(schema, dict):
            return one
        if one.get("style", "json") != "json":
            return {key: one[key] for key in one.keys() - {"name"}}
        grammar = ebnf_of(
            native,
            schema,
            strict=True,
            short=short,
            whitespace=one.get("whitespace", "spaced"),
            name=one.get("name", "a json_schema of response_format.format"),
        )
        return {"type": "grammar", "grammar": grammar}

    return changed(value, change)

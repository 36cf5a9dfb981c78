"""Keywords of JSON Schema: their valid values, and what the compiler enforces of them, and of
regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from onestem.errors import RequestError

_ESCAPE = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\."
_CHARACTER = re.compile(
    r"\\x(?P<hex>[0-9a-fA-F]{2})|\\u(?P<unicode>[0-9a-fA-F]{4})|\\(?P<escaped>.)|(?P<raw>.)",
    re.DOTALL,
)
# Each part is read once, whatever follows it: a pattern may be long, and its writer hostile.
_CLASS = re.compile(r"\[\^?[^\]]*+(?:\]|\Z)")
_MODIFIER = re.compile(r"\(\?(?!:|<[A-Za-z_]\w*>)<?.?")
_PART = re.compile(
    r"\((?:\?:|\?<\w*+>)?|\{(?P<least>\d++)(?P<comma>,?)(?P<most>\d*+)\}|.", re.DOTALL
)
_MOST_COUNTED = 10**9
_CLASS_ESCAPES = frozenset("dDwWsS")
_JSON_ESCAPES = frozenset('nrtfv0c"\\')
_MUST_ESCAPE = frozenset((*map(chr, range(0x20)), '"', "\\"))


def pattern_fault(pattern: str) -> str | None:
    """What of a pattern is not enforced, as a noun for an error; None: nothing.

    The compiler reads ECMA-262 patterns as if they were between `^` and `$`, which is stricter and
    so harmless. It ignores anchors elsewhere, lookarounds and unknown escapes. It also writes
    characters that JSON must escape as they are.
    """
    return _character_fault(pattern) or regex_fault(pattern)


def regex_fault(pattern: str) -> str | None:
    """The same of a pattern outside JSON: lookarounds, modifiers, and anchors inside."""
    structure = _structure(pattern)
    modifier = _MODIFIER.search(structure)
    if modifier is not None:
        return f"a pattern with {modifier[0]}...) ({pattern!r:.80})"
    anchor = re.search(r"(?<!^)\^|\$(?!\Z)", structure)
    if anchor is not None:
        return f"a pattern with {anchor[0]!r} inside ({pattern!r:.80})"
    return None


def _character_fault(pattern: str) -> str | None:
    for found in _CHARACTER.finditer(pattern):
        code, escaped = found["hex"] or found["unicode"], found["escaped"]
        character = chr(int(code, 16)) if code else found["raw"]
        if escaped in _JSON_ESCAPES or character in _MUST_ESCAPE:
            return f"a pattern with quotes, backslashes or control characters ({pattern!r:.80})"
        if escaped is not None and escaped.isalnum() and escaped not in _CLASS_ESCAPES:
            return f"a pattern with \\{escaped} ({pattern!r:.80})"
    return None


def _structure(pattern: str) -> str:
    """A pattern's groups, anchors and quantifiers, with an x for each character."""
    return _CLASS.sub("x", re.sub(_ESCAPE, "x", pattern, flags=re.DOTALL))


def num_characters(pattern: str) -> int:
    """Characters of a pattern with its repetitions written out, as many as they may be."""
    totals, last = [0], 0  # of each open group; of what a quantifier would repeat
    for found in _PART.finditer(_structure(pattern)):
        part = found[0]
        if part.startswith("("):
            totals.append(0)
        elif part == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif found["least"] is not None:
            copies = max(1, _count(found["least"]), _count(found["most"]))
            totals[-1] += last * (copies - 1)
            last = min(last * copies, _MOST_COUNTED)
        elif part not in "*+?":
            last = 1
            totals[-1] += last
    return sum(totals)


def _count(digits: str) -> int:
    return min(int(digits or 0), _MOST_COUNTED) if len(digits) < 20 else _MOST_COUNTED


_TYPES = ("string", "number", "integer", "object", "array", "boolean", "null")
_INT32 = 2**31 - 1
# The compiler's own limits for integers that are multiples (0.2.8).
_MOST_MULTIPLE, _MOST_RANGE = 1_024, 10_000
_DECIMALS = 6  # of a number's bounds: it rounds others
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_FORMATS = frozenset(
    (
        "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
        "uri-reference", "uri-template",
    )
)  # fmt: skip

# They do not restrict what is valid.
_ANNOTATIONS = frozenset(
    (
        "title", "description", "default", "examples", "example", "deprecated", "readOnly",
        "writeOnly", "$comment", "$schema", "$id", "$anchor", "$vocabulary", "discriminator",
    )
)  # fmt: skip
# Known to JSON Schema, and not to the compiler.
_UNENFORCED = (
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
    "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
    "contentEncoding", "contentMediaType", "contentSchema",
)  # fmt: skip
# Of these the compiler takes the first and ignores its neighbours.
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")

Schema = Mapping[str, Any]
Kind = tuple[str, Callable[[Any], bool]]


def _is_schema(value: Any) -> bool:
    return isinstance(value, (Mapping, bool))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


_SCHEMA: Kind = ("a schema (an object, true or false)", _is_schema)
_SCHEMAS: Kind = (
    "a list of schemas", lambda v: isinstance(v, list) and bool(v) and all(map(_is_schema, v)),
)  # fmt: skip
_NAMED: Kind = (
    "an object of schemas",
    lambda v: isinstance(v, Mapping) and all(map(_is_schema, v.values())),
)
_TEXT: Kind = ("a string", lambda v: isinstance(v, str))
_NUMBER: Kind = ("a number", _is_number)
_COUNT: Kind = (
    f"an integer from 0 to {_INT32}",
    lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= _INT32,
)
_KINDS: dict[str, Kind] = {
    "$ref": _TEXT,
    "pattern": _TEXT,
    "format": _TEXT,
    "const": ("", lambda _: True),
    "enum": ("a list of values", lambda v: isinstance(v, list) and bool(v)),
    "type": (f"one or several of {', '.join(_TYPES)}", _is_type),
    "required": ("a list of strings", _is_texts),
    "multipleOf": ("a number above 0", lambda v: _is_number(v) and v > 0),
    **dict.fromkeys(("$defs", "definitions", "properties", "patternProperties"), _NAMED),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("items", "additionalProperties", "propertyNames"), _SCHEMA),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), _SCHEMA),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _COUNT),
    **dict.fromkeys(("minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(_BOUNDS, _NUMBER),
}
_ASSERTIONS = frozenset(_KINDS) - {"$defs", "definitions"}
# Without a type, these say which one the compiler takes; it then ignores others.
_OBJECT_SIGNS = frozenset(("properties", "additionalProperties", "unevaluatedProperties"))
_ARRAY_SIGNS = frozenset(("items", "prefixItems", "unevaluatedItems"))
_OF_OBJECTS = _OBJECT_SIGNS | {
    "required", "patternProperties", "propertyNames", "minProperties", "maxProperties",
}  # fmt: skip
_OF_ARRAYS = _ARRAY_SIGNS | {"minItems", "maxItems"}


def keyword_fault(schema: Schema, name: str) -> None:
    """Raise `RequestError` for a keyword with a wrong kind of value; `name`: the whole schema's."""
    for keyword, value in schema.items():
        expected, fits = _KINDS.get(keyword, ("", None))
        if fits is not None and not fits(value):
            raise RequestError(
                f"{name} cannot be used: {keyword} is {value!r:.80}, expected {expected}"
            )


def is_enforced(keyword: str, value: Any) -> bool:
    """Whether the compiler enforces a keyword with this value, whatever is beside it; true of those
    that restrict nothing. `value` is of the keyword's kind."""
    if keyword == "pattern":
        return pattern_fault(value) is None
    if keyword == "format":
        return value in _FORMATS
    return keyword in _KINDS or keyword in _ANNOTATIONS


def neighbour_fault(schema: Schema, *, in_names: bool) -> str | None:
    """What of one schema, not of those inside it, is not enforced: a noun for an error.

    Args:
        in_names: the schema is one of `propertyNames`, whose type is string.
    """
    unknown = _unknown_keyword(schema)
    if unknown is not None:
        return unknown
    if "patternProperties" in schema or "pattern" in schema:
        patterns = (*schema.get("patternProperties", ()), schema.get("pattern", ""))
        fault = next(filter(None, map(pattern_fault, patterns)), None)
        if fault is not None:
            return fault
    return (
        _beside_alternative(schema)
        or (_in_names(schema) if in_names else _untyped(schema))
        or _of_values(schema)
        or _of_strings(schema)
        or _of_numbers(schema)
    )


def _unknown_keyword(schema: Schema) -> str | None:
    for keyword in _UNENFORCED:
        if keyword in schema and schema[keyword] is not False:
            return repr(keyword)
    known = (_KINDS.keys() | _ANNOTATIONS).union(_UNENFORCED)
    for keyword in schema:
        if keyword not in known and not keyword.startswith("x-"):
            return f"the unknown keyword {keyword!r}"
    both = schema.get("allOf", ())
    return "'allOf' of several schemas" if len(both) > 1 else None


def _beside_alternative(schema: Schema) -> str | None:
    chosen = next((keyword for keyword in _ALTERNATIVES if keyword in schema), None)
    if chosen is None:
        return None
    harmless = {"type", "const", "enum"} if chosen in ("const", "enum") else {chosen}
    others = sorted((_ASSERTIONS & set(schema)) - harmless)
    return f"{others[0]!r} beside {chosen!r}" if others else None


def _in_names(schema: Schema) -> str | None:
    for keyword in ("$ref", "anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return f"{keyword!r} in 'propertyNames'"
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    if type_names(schema) not in ((), ("string",)) or not _is_texts(list(values)):
        return "'propertyNames' other than strings"
    return None


def _untyped(schema: Schema) -> str | None:
    if "type" in schema or not schema.keys().isdisjoint(_ALTERNATIVES):
        return None
    enforced = frozenset[str]()
    if not schema.keys().isdisjoint(_OBJECT_SIGNS):
        enforced = _OF_OBJECTS
    elif not schema.keys().isdisjoint(_ARRAY_SIGNS):
        enforced = _OF_ARRAYS
    left = sorted((_ASSERTIONS & set(schema)) - enforced)
    return f"{left[0]!r} without the 'type' that it is of" if left else None


def type_names(schema: Schema) -> tuple[str, ...]:
    """A schema's types; () where it names none."""
    given = schema.get("type", [])
    return tuple(given) if isinstance(given, list) else (given,)


def same(one: Any, other: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def _of_values(schema: Schema) -> str | None:
    """`const` and `enum` are taken as they are, whatever is beside them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    names = type_names(schema)
    for value in values:
        if names and not any(is_of_type(value, name) for name in names):
            return f"the value {value!r:.40} that is not of its 'type'"
    both = "const" in schema and "enum" in schema
    if both and not any(same(schema["const"], value) for value in schema["enum"]):
        return "a 'const' that is not in its 'enum'"
    return None


def is_of_type(value: Any, name: str) -> bool:
    """Whether a JSON value is of a type of JSON Schema."""
    if name in ("number", "integer"):
        return _is_number(value) and (name == "number" or value % 1 == 0)
    classes: dict[str, Any] = {
        "string": str, "object": Mapping, "array": list, "boolean": bool, "null": type(None),
    }  # fmt: skip
    return isinstance(value, classes[name])


def _of_strings(schema: Schema) -> str | None:
    length = "minLength" in schema or "maxLength" in schema
    if "pattern" in schema and length:
        return "'pattern' together with a length"
    if "format" not in schema:
        return None
    if schema["format"] not in _FORMATS:
        return f"the format {schema['format']!r}"
    if length or "pattern" in schema:
        return "'format' together with a length or a pattern"
    return None


def _of_numbers(schema: Schema) -> str | None:
    names = type_names(schema)
    if "number" in names:
        if "multipleOf" in schema:
            return "'multipleOf' of a number (of an integer it is enforced)"
        for keyword in _BOUNDS:
            if keyword in schema and _decimals(schema[keyword]) > _DECIMALS:
                return f"{keyword!r} with more than {_DECIMALS} decimals"
    if "integer" in names:
        for keyword in _BOUNDS:
            if abs(schema.get(keyword, 0)) >= 2**62:
                return f"{keyword!r} beyond 62 bits"
    if "integer" in names and "multipleOf" in schema:
        return _of_multiples(schema)
    return None


def _decimals(bound: float) -> int:
    exponent = Decimal(repr(bound)).normalize().as_tuple().exponent
    return -exponent if isinstance(exponent, int) else 0


def _of_multiples(schema: Schema) -> str | None:
    factor = schema["multipleOf"]
    if factor % 1 or factor > _MOST_MULTIPLE:
        return f"a 'multipleOf' that is no integer from 1 to {_MOST_MULTIPLE:,}"
    low = max((schema[k] for k in _BOUNDS[:2] if k in schema), default=None)
    high = min((schema[k] for k in _BOUNDS[2:] if k in schema), default=None)
    if low is None and high is None:
        return None
    if low is None or high is None or high - low >= _MOST_RANGE:
        return f"'multipleOf' with bounds on one side alone, or more than {_MOST_RANGE - 1:,} apart"
    return None

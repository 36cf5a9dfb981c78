"""Structured output: `response_format` as a mask over the next token, by xgrammar.

A grammar is compiled once per format (milliseconds to seconds for large schemas) and kept; each
sequence then has a matcher that walks along its tokens. The matcher is a function of the sampled
ids, so a sequence that was set back or resumed rebuilds it from them.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onestem.engine.tokenizer import Tokenizer
from onestem.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    import xgrammar

__all__ = ["GrammarCompiler", "GrammarState", "check_response_format"]

_CACHE_ENTRIES = 256
# Models that never saw a schema may write spaces for ever; nobody indents deeper than this.
_MOST_WHITESPACE = 64
_SCHEMA = "response_format.json_schema.schema"

# JSON Schema keywords that the compiler reads over without a word. An answer that breaks its schema
# is worse than an error, so they are refused.
_UNENFORCED = (
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
    "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
# Of these the compiler takes the first and reads over its neighbours.
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")
_ASSERTIONS = frozenset(
    (
        *_ALTERNATIVES, "type", "properties", "required", "additionalProperties",
        "patternProperties", "propertyNames", "minProperties", "maxProperties", "items",
        "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "minimum",
        "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    )
)  # fmt: skip
# Characters that a JSON string must escape; of patterns, the compiler writes them as they are.
_MUST_ESCAPE = frozenset((*map(chr, range(0x20)), '"', "\\"))
_PATTERN_CHARACTER = re.compile(
    r"\\(?:(?P<class>[nrtfv0\\\"c])|x(?P<hex>[0-9a-fA-F]{2})|u(?P<unicode>[0-9a-fA-F]{4})|.)|(?P<raw>.)",
    re.DOTALL,
)
_BROKEN_FORMATS = ("json-pointer", "relative-json-pointer")
# Strings of limited length may hold raw control characters, says the compiler; JSON says not. Only
# the newline can stand between values in what models write, and is no part of those strings.
_CONTROL_BYTES = frozenset(range(0x20)) - {0x0A}
_SUBSCHEMAS = ("items", "additionalProperties", "propertyNames")
_SUBSCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SUBSCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def check_response_format(response_format: Mapping[str, Any] | None) -> None:
    """Refuse what is not OpenAI's object, without compiling anything and without xgrammar.

    Raises:
        RequestError: an unknown type or field, or no schema.
        UnsupportedError: the schema uses what cannot be enforced.
    """
    _schema_of(response_format)


def _schema_of(response_format: Mapping[str, Any] | None) -> tuple[dict[str, Any], bool] | None:
    """The JSON schema of a format and whether it is strict; None where any text will do."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise RequestError(
            f"response_format is {type(response_format).__name__}, expected an object with a type"
        )
    kind = response_format.get("type")
    if kind == "json_schema":
        _refuse_unknown("response_format", response_format, {"type", "json_schema"})
        return _given_schema(response_format.get("json_schema"))
    if kind not in ("text", "json_object"):
        raise RequestError(
            f"response_format.type is {kind!r}, expected 'text', 'json_object' or 'json_schema'"
        )
    _refuse_unknown("response_format", response_format, {"type"})
    return None if kind == "text" else ({"type": "object"}, False)


def _given_schema(given: object) -> tuple[dict[str, Any], bool]:
    name = "response_format.json_schema"
    if not isinstance(given, Mapping):
        raise RequestError(f"{name} is {given!r}, expected an object with name and schema")
    _refuse_unknown(name, given, {"name", "description", "schema", "strict"})
    schema, strict = given.get("schema"), given.get("strict")
    if not isinstance(schema, Mapping):
        raise RequestError(f"{name}.schema is {schema!r}, expected a JSON schema (an object)")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{name}.strict is {strict!r}, expected true or false")
    _refuse_unenforced(schema, strict is not False)
    return dict(schema), strict is not False


def _refuse_unenforced(schema: Mapping[str, Any], strict: bool) -> None:
    """Raise `UnsupportedError` for what the compiler would not hold an answer to.

    `oneOf` is enforced as `anyOf`: an answer fits at least one of the schemas. Strings with a
    `minLength` or `maxLength` are written without escapes, so without quotes and newlines.
    """
    for part in _subschemas(schema):
        reason = _unenforced(part, strict)
        if reason is not None:
            raise UnsupportedError(f"{_SCHEMA} has {reason}, which is not enforced: leave it out")


def _unenforced(schema: Mapping[str, Any], strict: bool) -> str | None:
    """What of one schema, not of those inside it, cannot be enforced."""
    for keyword in _UNENFORCED:
        if keyword in schema and schema[keyword] is not False:
            return repr(keyword)
    # In strict mode nothing unnamed is allowed anyway.
    if not strict and schema.get("unevaluatedProperties", True) is not True:
        return "'unevaluatedProperties'"
    both = schema.get("allOf")
    if isinstance(both, list) and len(both) > 1:
        return "'allOf' of several schemas"
    if not str(schema.get("$ref", "#")).startswith("#"):
        return f"a reference to another document ({schema['$ref']})"
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        return "'pattern' together with a length"
    if schema.get("format") in _BROKEN_FORMATS:
        return f"the format {schema['format']!r}"
    named = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(named if isinstance(named, Mapping) else ())):
        if isinstance(pattern, str) and _names_escaped(pattern):
            return f"a pattern with quotes, backslashes or control characters ({pattern!r})"
    return _unenforced_neighbour(schema)


def _names_escaped(pattern: str) -> bool:
    """Whether a regular expression names a character that a JSON string must escape."""
    for found in _PATTERN_CHARACTER.finditer(pattern):
        code = found["hex"] or found["unicode"]
        character = chr(int(code, 16)) if code else found["raw"]
        if found["class"] or character in _MUST_ESCAPE:
            return True
    return False


def _unenforced_neighbour(schema: Mapping[str, Any]) -> str | None:
    chosen = next((keyword for keyword in _ALTERNATIVES if keyword in schema), None)
    if chosen is None:
        return None
    harmless = {"type", "const", "enum"} if chosen in ("const", "enum") else {chosen}
    others = sorted((_ASSERTIONS & set(schema)) - harmless)
    return f"{others[0]!r} beside {chosen!r}" if others else None


def _subschemas(schema: object) -> Iterator[Mapping[str, Any]]:
    """A schema and all inside it; values (`enum`, `default`, ...) are not schemas."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    inside = [schema.get(keyword) for keyword in _SUBSCHEMAS]
    for keyword in _SUBSCHEMA_LISTS:
        listed = schema.get(keyword)
        inside.extend(listed if isinstance(listed, list) else ())
    for keyword in _SUBSCHEMA_MAPS:
        named = schema.get(keyword)
        inside.extend(named.values() if isinstance(named, Mapping) else ())
    for part in inside:
        yield from _subschemas(part)


def _refuse_unknown(name: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise RequestError(
            f"{name} has the unknown field {unknown[0]!r}, expected {', '.join(sorted(known))}"
        )


class GrammarCompiler:
    """Compiles response formats for one tokenizer. Safe to use from several threads.

    Args:
        tokenizer: the model's.
        vocab_size: columns of the logits, if there are more than tokens; those are never allowed.
        stop_token_ids: ids that may end an answer once it is complete: all end-of-sequence ids of
            the model. None: the tokenizer's one.

    xgrammar is imported with the first format that needs it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int | None = None,
        stop_token_ids: Iterable[int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size or tokenizer.vocab_size
        eos = tokenizer.eos_token_id
        named = (() if eos is None else (eos,)) if stop_token_ids is None else stop_token_ids
        self.stop_token_ids = sorted(set(named))
        self._lock = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._compiled: OrderedDict[str, xgrammar.CompiledGrammar] = OrderedDict()

    def compile(
        self, response_format: Mapping[str, Any] | None, output_token_ids: Iterable[int] = ()
    ) -> GrammarState | None:
        """A new sequence's state; None where the format is text.

        Args:
            response_format: OpenAI's object.
            output_token_ids: tokens that the sequence sampled already.

        Raises:
            RequestError: the format or its schema is not one, or the tokens do not follow it.
            UnsupportedError: the schema uses what cannot be enforced, or xgrammar is not installed.
        """
        wanted = _schema_of(response_format)
        if wanted is None:
            return None
        with self._lock:
            grammar = self._grammar(*wanted)
        state = GrammarState(grammar, self.vocab_size, self.stop_token_ids)
        for token in output_token_ids:
            state.accept(token)
        return state

    def _grammar(self, schema: dict[str, Any], strict: bool) -> xgrammar.CompiledGrammar:
        # Properties are written in the schema's order, so keys must not be sorted.
        try:
            key = json.dumps([schema, strict])
        except (TypeError, ValueError) as error:
            raise RequestError(f"{_SCHEMA} is not JSON: {error}") from error
        known = self._compiled.get(key)
        if known is not None:
            self._compiled.move_to_end(key)
            return known
        compiler = self._loaded()
        try:
            compiled = compiler.compile_json_schema(
                json.dumps(schema), strict_mode=strict, max_whitespace_cnt=_MOST_WHITESPACE
            )
        except Exception as error:  # xgrammar raises many kinds for a bad schema
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            reason = re.sub(r"^\[[^]]*\] \S+: ", "", reason)  # time and source line
            raise RequestError(f"{_SCHEMA} cannot be used: {reason}") from error
        self._compiled[key] = compiled
        if len(self._compiled) > _CACHE_ENTRIES:
            self._compiled.popitem(last=False)
        return compiled

    def _loaded(self) -> xgrammar.GrammarCompiler:
        if self._compiler is not None:
            return self._compiler
        try:
            import xgrammar
        except ImportError as error:
            raise UnsupportedError(
                "response_format needs xgrammar, which is not installed: pip install xgrammar"
            ) from error
        vocabulary = [
            self._usable_bytes(token)
            for token in range(min(self._tokenizer.vocab_size, self.vocab_size))
        ]
        info = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=self.stop_token_ids,
        )
        # One cache is enough, and ours is bounded.
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        return self._compiler

    def _usable_bytes(self, token_id: int) -> bytes:
        """A token's bytes, or none, and xgrammar never allows it."""
        if token_id in self._tokenizer.special_ids:
            return b""
        data = self._tokenizer.token_bytes(token_id)
        return data if _CONTROL_BYTES.isdisjoint(data) else b""


class GrammarState:
    """Where one sequence stands in its grammar."""

    def __init__(
        self, grammar: xgrammar.CompiledGrammar, vocab_size: int, stop_token_ids: list[int]
    ) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._mask = torch.full(((vocab_size + 31) // 32,), -1, dtype=torch.int32)
        self._stops = _packed(stop_token_ids, len(self._mask))
        self._filled = False

    def fill_mask(self) -> Tensor:
        """Which tokens may come next: bits packed in int32 `[ceil(vocab / 32)]`, on the CPU.

        The tensor belongs to this state and is written again at the next call after `accept`.
        """
        if not self._filled:
            if self._matcher.is_terminated():
                self._mask.copy_(self._stops)
            else:
                self._matcher.fill_next_token_bitmask(self._mask.unsqueeze(0))
            self._filled = True
        return self._mask

    def accept(self, token_id: int) -> None:
        """Take a sampled token.

        Raises:
            RequestError: the grammar does not allow it.
        """
        if not self._matcher.accept_token(token_id):
            raise RequestError(
                f"token {token_id} does not follow the response_format, expected one that "
                "fill_mask allows"
            )
        self._filled = False

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing but its end may follow, or it has ended.

        So a closed JSON object ends without a step for the end-of-sequence token.
        """
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        return not bool((self.fill_mask() & ~self._stops).any())


def _packed(token_ids: Iterable[int], num_words: int) -> Tensor:
    """Token ids as bits of int32 `[num_words]`."""
    words = [0] * num_words
    for token in token_ids:
        if token < 32 * num_words:
            words[token // 32] |= 1 << (token % 32)
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)

"""Each keyword of JSON Schema: what is written under its grammar fits, says an independent
validator; or the schema is refused. Nothing is read over, and nothing is printed."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from typing import Any

import jsonschema_rs
import pytest

from onestem.engine.grammar.compiler import GrammarCompiler
from onestem.engine.grammar.ebnf import ebnf_of, longest_entry
from onestem.engine.grammar.held import held_schema
from onestem.engine.grammar.schema import check_schema
from onestem.engine.grammar.state import GrammarState
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError, UnsupportedError
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer

xgrammar = pytest.importorskip("xgrammar")
CORE = xgrammar.base._core

INTEGER = {"type": "integer"}
NULL = {"type": "null"}
STRING = {"type": "string"}


def string(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def integer(**more: Any) -> dict[str, Any]:
    return {"type": "integer", **more}


def number(**more: Any) -> dict[str, Any]:
    return {"type": "number", **more}


def array(**more: Any) -> dict[str, Any]:
    return {"type": "array", **more}


def an_object(**more: Any) -> dict[str, Any]:
    return {"type": "object", **more}


def tagged(name: str) -> dict[str, Any]:
    tag = {"kind": {"const": name}, "value": INTEGER}
    return an_object(properties=tag, required=["kind"])


ENFORCED = [
    integer(), integer(minimum=-3, maximum=12), integer(exclusiveMinimum=0),
    integer(exclusiveMaximum=-5), integer(minimum=3, exclusiveMinimum=1),
    integer(multipleOf=7), integer(multipleOf=7.0, minimum=-20, maximum=100), integer(multipleOf=1),
    number(minimum=0.5, maximum=1.25), number(exclusiveMinimum=0, exclusiveMaximum=1),
    number(minimum=-1.5), number(maximum=3), number(exclusiveMinimum=2.5, maximum=2.6),
    number(minimum=5, maximum=5), number(minimum=-0.000001, maximum=0.000001), number(minimum=1e10),
    string(minLength=2, maxLength=4), string(maxLength=0), string(minLength=2, maxLength=30),
    string(minLength=3), string(maxLength=17), array(items=string(maxLength=18), maxItems=2),
    string(pattern="^[^x]*$"),
    string(pattern=".+"), string(pattern=r"^\S\W\D$"), string(pattern="^a|b$"),
    string(pattern="(ab?)+c{2,3}"), string(pattern=r"^[\w.$^-]+$"), string(pattern=r"^[^\d(?:]$"),
    string(pattern=r"^\u00e9\x41$"), string(pattern="^$"), string(pattern=r"^(?:a|b)*?c$"),
    string(pattern=r"^(?<n>a)\/\^\$\(\?=\.$"), string(pattern=r"^\d{3}-[^x\s]\u00e9x*\.$"),
    *(string(format=name) for name in ("uuid", "ipv6", "duration", "hostname", "uri")),
    *(string(format=name) for name in ("uri-reference", "uri-template")),
    array(items=INTEGER, minItems=2, maxItems=3), array(prefixItems=[INTEGER, NULL]),
    array(prefixItems=[INTEGER], items=False), array(prefixItems=[INTEGER], items=NULL, minItems=2),
    array(prefixItems=[INTEGER], unevaluatedItems=NULL), array(maxItems=0), array(items=True),
    array(items=INTEGER, uniqueItems=False), {"items": INTEGER, "minItems": 1},
    an_object(properties={"a": INTEGER, "b": NULL}), an_object(properties={"a": True}),
    an_object(properties={"a": INTEGER, "b": NULL}, required=["b"]),
    an_object(
        properties={"a": INTEGER, "b": NULL, "c": NULL}, minProperties=2, additionalProperties=False
    ),
    an_object(properties={"a": INTEGER, "b": NULL}, maxProperties=1),
    an_object(properties={"a": INTEGER}, additionalProperties=NULL),
    an_object(properties={"a": INTEGER}, additionalProperties=False),
    an_object(additionalProperties=INTEGER, minProperties=1, maxProperties=2),
    an_object(patternProperties={"^a": STRING}, additionalProperties=False),
    an_object(patternProperties={"b+": INTEGER}, additionalProperties=False, maxProperties=1),
    an_object(propertyNames={"pattern": "^z+$"}, minProperties=1, maxProperties=2),
    an_object(propertyNames={"enum": ["a", "b"]}), an_object(propertyNames=string(maxLength=2)),
    {"properties": {"not": INTEGER, "if": INTEGER}, "required": ["not"]},
    {"type": ["string", "null"], "maxLength": 2},
    {"type": ["integer", "string"], "minimum": 3, "maxLength": 1},
    {"enum": [1, "a", None, [1, {"b": True}], 1.5, {"not": 1}]}, {"const": {"a": 'é\n"'}},
    {"type": "string", "enum": ["a", "b"], "const": "a"},
    {"anyOf": [integer(minimum=0), NULL], "default": None, "title": "Age"}, {"allOf": [INTEGER]},
    {"oneOf": [INTEGER, NULL, {"const": "x"}]}, {"oneOf": [{"enum": [1, 2]}, {"enum": [True, 3]}]},
    {"oneOf": [tagged("a"), tagged("b")]},
    {
        "$defs": {"a": tagged("a"), "b": tagged("b")}, "discriminator": {"propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    },
    {"$ref": "#/$defs/a", "description": "x", "$defs": {"a": INTEGER}},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": INTEGER}},
    {"$ref": "#/definitions/Rec%3Cx%2C~0y%3E", "definitions": {"Rec<x,~y>": INTEGER}},
    {
        "$defs": {"n ode": an_object(properties={"c": array(items={"$ref": "#/$defs/n%20ode"})})},
        "$ref": "#/$defs/n%20ode",
    },
    {
        "$defs": {"n": an_object(properties={"c": array(items={"$ref": "#/$defs/n"})})},
        "$ref": "#/$defs/n",
    },
    an_object(properties={"a": INTEGER, "b": {"anyOf": [{"$ref": "#/properties/a"}, NULL]}}),
    an_object(properties={"a": {"$ref": "#"}}, additionalProperties=False),
    an_object(properties={"propertyNames": {"anyOf": [INTEGER, NULL]}}),
    {
        "title": "T", "description": "d", "default": 1, "examples": [1], "deprecated": True,
        "readOnly": True, "writeOnly": False, "$comment": "c", "x-order": 1, "type": "integer",
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.org/a",
    },
]  # fmt: skip

# Right in form, and wrong in the calendar or in a length, says the validator.
FORMATS = [
    ("date", r"\d{4}-(0\d|1[0-2])-[0-3]\d"), ("time", r"[0-2]\d:[0-5]\d:[0-6]\d\S*"),
    ("date-time", r"\d{4}-(0\d|1[0-2])-[0-3]\dT[0-2]\d:[0-5]\d:[0-6]\d\S*"),
    ("ipv4", r"\d{1,3}(\.\d{1,3}){3}"), ("email", r"\S+@\S+"),
]  # fmt: skip

REFUSED = [
    (integer(**{"not": {"const": 3}}), "has 'not'"),
    ({"if": {}, "then": {}}, "has 'if'"),
    (array(items=INTEGER, uniqueItems=True), "has 'uniqueItems'"),
    (array(contains=INTEGER), "has 'contains'"),
    (an_object(dependentRequired={"a": ["b"]}), "has 'dependentRequired'"),
    (string(contentEncoding="base64"), "has 'contentEncoding'"),
    (string(frobs=3), "has the unknown keyword 'frobs'"),
    (string(nullable=True), "has the unknown keyword 'nullable'"),
    (an_object(additionalItems=False), "has the unknown keyword 'additionalItems'"),
    ({"allOf": [INTEGER, {"maximum": 5}]}, "'allOf' of several schemas"),
    ({"$ref": "https://example.org/a.json"}, "reference to another document"),
    ({"$ref": "#a"}, "a reference by an anchor"),
    ({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": INTEGER}}, r"'minimum' beside '\$ref'"),
    ({"anyOf": [INTEGER, NULL], "maximum": 3}, "'maximum' beside 'anyOf'"),
    ({"enum": ["a"], "maxLength": 3}, "'maxLength' beside 'enum'"),
    ({"type": "string", "enum": ["a", 1]}, "the value 1 that is not of its 'type'"),
    ({"type": "integer", "const": True}, "the value True that is not of its 'type'"),
    ({"enum": [1], "const": True}, "a 'const' that is not in its 'enum'"),
    ({"minimum": 5}, "'minimum' without the 'type' that it is of"),
    ({"required": []}, "'required' without the 'type'"),
    ({"items": INTEGER, "maxLength": 5}, "'maxLength' without the 'type'"),
    (string(pattern="a+", maxLength=2), "'pattern' together with a length"),
    (string(format="date", maxLength=2), "'format' together with a length"),
    (string(pattern='a"'), "a pattern with quotes"),
    (string(pattern=r"a\n"), "a pattern with quotes"),
    (string(pattern=r"[a\x22]"), "a pattern with quotes"),
    (string(pattern=r"\\"), "a pattern with quotes"),
    (an_object(patternProperties={"\n": {}}), "a pattern with quotes"),
    (string(pattern="(?=a)b"), r"a pattern with \(\?=\.\.\.\)"),
    (string(pattern="^(?!a).*$"), r"a pattern with \(\?!\.\.\.\)"),
    (string(pattern="(?<=a)b"), r"a pattern with \(\?<=\.\.\.\)"),
    (string(pattern="(?i)b"), r"a pattern with \(\?i\.\.\.\)"),
    (string(pattern=r"(a)\1"), r"a pattern with \\1"),
    (string(pattern=r"\ba"), r"a pattern with \\b"),
    (string(pattern=r"\p{L}"), r"a pattern with \\p"),
    (string(pattern=r"[a]^b"), r"a pattern with '\^' inside"),
    (string(pattern="(a$)"), r"a pattern with '\$' inside"),
    (string(format="frobnicate"), "the format 'frobnicate'"),
    (integer(format="int32"), "the format 'int32'"),
    (string(format="json-pointer"), "the format 'json-pointer'"),
    (number(multipleOf=7), "'multipleOf' of a number"),
    ({"type": ["number", "null"], "multipleOf": 7}, "'multipleOf' of a number"),
    (integer(multipleOf=2.5), "a 'multipleOf' that is no integer from 1 to 1,024"),
    (integer(multipleOf=1025), "a 'multipleOf' that is no integer from 1 to 1,024"),
    (integer(multipleOf=2, minimum=0), "'multipleOf' with bounds on one side"),
    (integer(multipleOf=2, minimum=0, maximum=10_000), "'multipleOf' with bounds"),
    (integer(minimum=-(10**30)), "'minimum' beyond 62 bits"),
    (number(minimum=1e-7), "'minimum' with more than 6 decimals"),
    (an_object(required=["a"]), "a 'required' property that is not among its 'properties'"),
    (
        an_object(properties={"a": {}}, propertyNames={"pattern": "^z+$"}),
        "'propertyNames' beside 'properties'",
    ),
    (an_object(propertyNames={"enum": [1]}), "'propertyNames' other than strings"),
    (an_object(propertyNames={"anyOf": [STRING]}), "'anyOf' in 'propertyNames'"),
    (an_object(propertyNames=string(), minProperties=2), "a 'minProperties' above 1"),
    (an_object(additionalProperties=INTEGER, minProperties=2), "a 'minProperties' above 1"),
    (
        an_object(properties={"a": INTEGER}, patternProperties={"^a": STRING}),
        "'patternProperties' beside 'properties'",
    ),
    (an_object(patternProperties={"^a": {}, "b$": {}}), "'patternProperties' with several"),
    (
        an_object(patternProperties={"^a": STRING}, additionalProperties=INTEGER),
        "'patternProperties' where others are allowed",
    ),
    ({"oneOf": [INTEGER, number()]}, "a 'oneOf' of schemas that one answer may fit"),
    ({"oneOf": [tagged("a"), tagged("a")]}, "a 'oneOf' of schemas that one answer may fit"),
    ({"oneOf": [INTEGER, {}]}, "a 'oneOf' of schemas that one answer may fit"),
    ({"properties": {"a": {"items": {"$defs": {"b": {"not": {}}}}}}}, "has 'not'"),
]

NOT_SCHEMAS = [
    (string(maxLength=-1), "maxLength is -1, expected an integer from 0"),
    (string(maxLength=2**33), "maxLength is 8589934592, expected an integer from 0"),
    (integer(minimum=True), "minimum is True, expected a number"),
    (integer(multipleOf=0), "multipleOf is 0, expected a number above 0"),
    (string(pattern=5), "pattern is 5, expected a string"),
    (string(format=5), "format is 5, expected a string"),
    (an_object(required=[5]), r"required is \[5\], expected a list of strings"),
    ({"properties": 3}, "properties is 3, expected an object of schemas"),
    ({"anyOf": []}, r"anyOf is \[\], expected a list of schemas"),
    ({"enum": []}, r"enum is \[\], expected a list of values"),
    (array(items=[INTEGER]), "items is .*, expected a schema"),
    ({"type": []}, r"type is \[\], expected one or several of string, "),
    ({"type": "frob"}, "type is 'frob', expected one or several of string, "),
    ({"$ref": "#"}, "'#' leads to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "leads to itself"),
    ({"$ref": "#/$defs/b", "$defs": {"a": INTEGER}}, "leads to no schema in it"),
    ({"$ref": "#/$defs/a%2Fb", "$defs": {"a%2Fb": INTEGER}}, "leads to no schema in it"),
    ({"$ref": "#/default", "default": {"not": {}}}, "leads to no schema in it"),
]


def json_schema(schema: dict[str, Any], *, strict: bool = True) -> dict[str, Any]:
    given = {"name": "answer", "schema": schema, "strict": strict}
    return {"type": "json_schema", "json_schema": given}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    tokenizer = Tokenizer.from_directory(
        make_byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    )
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def check_follows(
    compiler: GrammarCompiler, schema: dict[str, Any], ids: list[int], *, fits: bool
) -> None:
    """Tokens that fit a schema end its answer; others are refused."""
    state = compiler.compile(json_schema(schema))
    assert state is not None

    def accept_all() -> None:
        for token in ids:
            state.accept(token)

    if fits:
        accept_all()
        assert state.is_finished
    else:
        with pytest.raises(RequestError, match="does not follow the response_format"):
            accept_all()


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class Walker:
    """Writes random answers under a grammar, in whole characters; such as end, soon."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = {
            token: data
            for token in range(tokenizer.vocab_size)
            if is_text(data := tokenizer.token_bytes(token))
        }
        self._stop = tokenizer.eos_token_id
        self._endings = {t for t, data in self._bytes.items() if data in (b'"', b"}", b"]")}

    def write(self, state: GrammarState, rng: random.Random) -> str | None:
        """None: it has not ended in time."""
        text = b""
        for length in range(400):
            if state.is_finished:
                return text.decode()
            words = state.fill_mask().tolist()
            allowed = [t for t in self._bytes if (words[t // 32] >> (t % 32)) & 1]
            endings = [t for t in allowed if t == self._stop or t in self._endings]
            hurry = endings and rng.random() < (0.2 if length < 40 else 0.9)
            token = rng.choice(endings if hurry else allowed)
            if token == self._stop:
                return text.decode()
            text += self._bytes[token]
            state.accept(token)
        return None


def answers(
    tokenizer: Tokenizer, compiler: GrammarCompiler, schema: dict[str, Any], *, strict: bool
) -> list[str]:
    walker, written = Walker(tokenizer), []
    start = compiler.compile(json_schema(schema, strict=strict))
    assert start is not None
    for seed in range(20):
        written.append(walker.write(start.at_start(), random.Random(seed)))
    ended = [text for text in written if text is not None]
    assert len(ended) > 2
    return ended


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("schema", ENFORCED, ids=json.dumps)
def test_answers_fit_their_schema(
    tokenizer: Tokenizer,
    compiler: GrammarCompiler,
    capfd: pytest.CaptureFixture[str],
    schema: dict[str, Any],
    strict: bool,
) -> None:
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    for text in answers(tokenizer, compiler, schema, strict=strict):
        assert validator.is_valid(json.loads(text)), text
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")  # a warning is of what is not enforced


@pytest.mark.parametrize(("name", "form"), FORMATS)
def test_formats_have_their_form(
    tokenizer: Tokenizer, compiler: GrammarCompiler, name: str, form: str
) -> None:
    validator = jsonschema_rs.Draft202012Validator(string(pattern=f"^{form}$"))
    for text in answers(tokenizer, compiler, string(format=name), strict=True):
        assert validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_what_would_not_be_enforced_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        check_schema(schema, strict=True)
    assert "\n" not in str(caught.value)
    assert "which is not enforced: leave it out" in str(caught.value)


def test_what_strict_mode_alone_enforces() -> None:
    open_names = an_object(patternProperties={"^a": STRING})
    unevaluated = an_object(properties={"a": INTEGER}, unevaluatedProperties=NULL)
    for schema in (open_names, unevaluated):
        check_schema(schema, strict=True)
        with pytest.raises(UnsupportedError, match="which is not enforced"):
            check_schema(schema, strict=False)


@pytest.mark.parametrize(("schema", "message"), NOT_SCHEMAS)
def test_schemas_that_are_none(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"schema cannot be used: .*{message}") as caught:
        check_schema(schema, strict=True)
    assert "\n" not in str(caught.value)


# --- tools ---------------------------------------------------------------------------------------

# As authors of tools write them: what is beside the point, or what no value fits.
OF_TOOLS = [
    an_object(properties={"a": string(optional=True), "b": INTEGER}, required=["b"], optional=[]),
    an_object(properties={"a": integer(enum=["1", "2", 3])}, required=["a"]),
    an_object(properties={"a": integer(enum=["1", "2"]), "b": INTEGER}, required=["b"]),
    an_object(properties={"a": {"type": "boolean", "enum": ["True"]}}),
    an_object(properties={"a": array(items=STRING, enum=["x", "y"]), "b": NULL}, required=["b"]),
    an_object(properties={"a": an_object(required=["b", "c"])}, required=["a"]),
    an_object(required=["b"], additionalProperties=integer(more=1)),
    an_object(properties={"a": integer(format="int32"), "b": string(format="binary")}),
    an_object(properties={"a": {"anyOf": [string(nullable=True), integer(enum=["x"])]}}),
]
UNFIT = [
    an_object(properties={"a": integer(enum=["1"])}, required=["a"]),
    an_object(properties={"a": INTEGER}, required=["b"], additionalProperties=False),
    an_object(properties={"a": integer(enum=["1"])}, additionalProperties=True),
    an_object(properties={"a": integer(enum=["1"]), "b": {"$ref": "#/properties/a"}}),
]
# Left out, for tools: what is written need not fit.
LOOSE = [
    (an_object(**{"not": {"required": ["a"]}}), an_object()),
    (
        an_object(properties={"a": array(items=STRING, uniqueItems=True)}),
        an_object(properties={"a": array(items=STRING)}),
    ),
    (an_object(properties={"a": string(pattern="(?=x)x")}), an_object(properties={"a": STRING})),
    (an_object(required=[], more=1), an_object(required=[])),
    (an_object(title="x" * 100_000), an_object(additionalProperties=True)),
]


@pytest.mark.parametrize("schema", OF_TOOLS, ids=json.dumps)
def test_arguments_fit_a_schema_that_is_not_enforced_as_it_is(
    tokenizer: Tokenizer, compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    held = held_schema(schema, False, "f")
    validator = jsonschema_rs.Draft202012Validator(schema)
    for text in answers(tokenizer, compiler, dict(held), strict=True):
        assert validator.is_valid(json.loads(text)), text
    with pytest.raises(RequestError, match=r"^f has .*, which is not enforced: .*leave out strict"):
        held_schema(schema, True, "f")


def test_arguments_are_held_to_what_their_schema_refers_to() -> None:
    node = an_object(properties={"next": {"$ref": "#/$defs/node"}}, additionalProperties=False)
    schema = {"type": "object", "$ref": "#/$defs/node", "$defs": {"node": node}}
    for exact in (False, True):
        assert held_schema(schema, exact, "f") == {"$defs": {"node": node}, **node}
    for other in (STRING, {"$ref": "#/$defs/node"}, {"$ref": "#/$defs/other"}):
        with pytest.raises(RequestError):
            held_schema({**schema, "$defs": {"node": other}}, True, "f")


def test_what_arguments_are_held_to() -> None:
    for schema in UNFIT:
        assert held_schema(schema, False, "f") == {"type": "object", "additionalProperties": True}
    for schema, held in LOOSE:
        assert held_schema(schema, False, "f") == held
    with pytest.raises(RequestError, match="pattern is 5, expected a string"):
        held_schema(an_object(title="x" * 100_000, properties={"a": string(pattern=5)}), False, "f")
    for schema in ENFORCED:
        assert held_schema(schema, True, "f") is held_schema(schema, False, "f") is schema


@pytest.mark.parametrize("schema", [number(), {}, {"type": ["number", "null"]}], ids=json.dumps)
def test_numbers_are_finite(
    tokenizer: Tokenizer, compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    for text in ("[1.5e99]", "[-2E-12]", "[7e+5]", "[1e300]"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        check_follows(compiler, array(items=schema), ids, fits=text != "[1e300]")


# --- lengths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("character", ["a", "é", "漢", "😀"])
@pytest.mark.parametrize(("least", "most"), [(0, 0), (0, 1), (1, 16), (0, 17), (3, 40), (0, 300)])
def test_lengths_are_of_characters(
    tokenizer: Tokenizer, compiler: GrammarCompiler, least: int, most: int, character: str
) -> None:
    schema = an_object(properties={"a": string(minLength=least, maxLength=most)}, required=["a"])
    for length, fits in ((least - 1, False), (least, True), (most, True), (most + 1, False)):
        if length < 0:
            continue
        text = json.dumps({"a": character * length}, ensure_ascii=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        check_follows(compiler, schema, ids, fits=fits)


@pytest.mark.parametrize(("least", "most"), [(0, 5), (1, 16), (0, 40), (1, 300)])
def test_strings_of_limited_length_have_escapes(
    tokenizer: Tokenizer, compiler: GrammarCompiler, least: int, most: int
) -> None:
    """An escape is one character; of a limit that is a budget it takes two."""
    schema = an_object(properties={"a": string(minLength=least, maxLength=most)}, required=["a"])
    is_budget = most > 16
    for count, fits in ((1, True), (most // 2, True), (most, not is_budget), (most + 1, False)):
        for character in '\n"\\':
            ids = tokenizer.encode(json.dumps({"a": character * count}), add_special_tokens=False)
            check_follows(compiler, schema, ids, fits=fits)


def test_an_escape_at_a_limit_is_finished(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    schema = an_object(properties={"a": string(maxLength=40)}, required=["a"])
    for text, fits in (("x" * 39 + "\n", True), ("x" * 40 + "\n", False), ("x" * 41, False)):
        ids = tokenizer.encode(json.dumps({"a": text}), add_special_tokens=False)
        check_follows(compiler, schema, ids, fits=fits)


@pytest.mark.parametrize("most", [17, 100, 2_000])
def test_a_limit_of_any_length_is_one_rule(most: int) -> None:
    names = [f"p{i}" for i in range(10)]
    schema = an_object(properties={name: string(maxLength=most) for name in names}, required=names)
    rules = ebnf_of(CORE, schema, strict=True, short=16).splitlines()
    assert sum("max_chars" in rule for rule in rules) == 1
    # A compiler copies what is repeated a number of times; exponents have two digits.
    assert not any("{" in re.sub(r'\{[01], -1\}|\{1, 2\}|"\{"', "", rule) for rule in rules)
    compiled = CORE.Grammar.from_ebnf("\n".join(rules), "root")  # it is one
    assert str(compiled.to_string())


def test_a_literal_is_no_rule() -> None:
    text = 'root_characters{0, 5} "\\"" [^x]'
    schema = an_object(properties={"a": {"const": text}, "b": string(maxLength=5)})
    written = ebnf_of(CORE, schema, strict=True, short=16)
    plain = xgrammar.Grammar.from_json_schema(json.dumps({"const": text}), any_whitespace=False)
    literal = re.search(r"^root ::= \(\((.*)\)\)$", str(plain), re.MULTILINE)
    assert literal is not None
    assert literal[1] in written


def test_a_token_that_opens_a_string_may_not_pass_its_limit() -> None:
    """A budget that begins inside a token is read over, so short strings have none."""
    tokens = [b'"', b':"ab', b'x"abcdefg', '"漢字'.encode(), b'","', b'"a"bcd']
    assert longest_entry(tokens, in_json=True) == 2
    assert longest_entry([*tokens, b'"\\n\\"', b': "\\'], in_json=True) == 4
    assert longest_entry(tokens, in_json=False) == 7
    assert "max_chars" not in ebnf_of(CORE, string(maxLength=40), strict=True, short=40)


# --- hostile schemas ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        string(pattern="[" * 90_000),
        string(pattern="a{" + "1" * 90_000),
        string(pattern="a{" + "1" * 90_000 + "}"),
        string(pattern="(?<" * 30_000),
        {"oneOf": [{"enum": list(range(n * 100, n * 100 + 100))} for n in range(50)]},
        {
            "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(900)} | {"900": INTEGER},
            "$ref": "#/$defs/0",
        },
    ],
    ids=["class", "count", "counted", "groups", "values", "chain"],
)
def test_checking_reads_each_part_once(schema: dict[str, Any]) -> None:
    """The square of these sizes took 1.5 s and more; once takes 0.05 s."""
    began = time.thread_time()
    with contextlib.suppress(UnsupportedError):
        check_schema(schema, strict=True)
    assert time.thread_time() - began < 1


# --- sizes -------------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = STRING
    for _ in range(depth - 1):
        schema = an_object(properties={"a": schema})
    return schema


def wide(count: int) -> dict[str, Any]:
    return an_object(properties={f"p{i}": STRING for i in range(count - 1)})


def doubled(times: int) -> dict[str, Any]:
    """2 ** times schemas in a few objects."""
    schema: dict[str, Any] = STRING
    for _ in range(times):
        schema = {"anyOf": [schema, schema]}
    return schema


@pytest.mark.parametrize(
    ("most", "more", "message"),
    [
        (nested(64), nested(65), "nested more than 64 levels deep, which is the limit: make it"),
        (nested(64), nested(100_000), "nested more than 64 levels deep"),
        (wide(1000), wide(1001), "has more than 1,000 schemas in it, which is the limit: make it"),
        (doubled(8), doubled(60), "has more than 1,000 schemas in it"),
        (
            {"enum": list(range(5000))},
            {"enum": list(range(5001))},
            "has 5,001 values in enums, more than 5,000, which is the limit",
        ),
        (
            string(pattern="(a{90}[b-z]|\\x41){10}"),
            string(pattern="(a{100}[b-z]|\\x41){10}"),
            "a pattern of more than 1,000 characters, its repetitions written out, which is the",
        ),
        (string(pattern="a" * 1000), string(pattern="a" * 1001), "a pattern of more than 1,000"),
        (
            {"const": "a" * 90_000},
            {"const": "a" * 100_000},
            r"has 100,\d+ characters, more than 100,000, which is the limit",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sizes(
    compiler: GrammarCompiler, most: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    assert compiler.compile(json_schema(most)) is not None
    with pytest.raises(UnsupportedError, match=message):
        check_schema(more, strict=True)

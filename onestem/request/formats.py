"""What an answer is held to: OpenAI's `response_format`, and vLLM's names for the same."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from onestem.checked import DescribedBy, Object, check, check_content, read_json, show
from onestem.errors import RequestError

MAX_CHOICES = 1024  # each is a sequence, as each of n is
MAX_DEPTH = 64  # objects and lists inside one another, in a body or in a text of JSON

Text = Annotated[str, Field(min_length=1)]
Whitespace = Literal["spaced", "compact", "any"]
WHITESPACE: Whitespace = "spaced"  # where a request says nothing


def is_deep(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a value has more than `depth` objects and lists inside one another, itself too."""
    level: list[Any] = [value]
    for _ in range(depth + 1):
        level = [one for one in level if type(one) in (dict, list)]
        if not level:
            return False
        level = list(chain.from_iterable(v.values() if type(v) is dict else v for v in level))
    return True


class NamedSchema(Object):
    """A JSON schema that an answer is held to."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class Structure(Object):
    """A tag of vLLM's older form, and its content."""

    begin: Text
    json_schema: dict[str, Any] = Field(alias="schema")
    end: str


Structures = Annotated[list[Structure], Field(min_length=1, max_length=MAX_CHOICES)]


class ResponseFormat(Object):
    """What an answer is held to: OpenAI's object, and further types (vLLM's structured outputs).
    Each but `text` and `json_object` has its content in the field of its name."""

    type: Literal[
        "text", "json_object", "json_schema", "regex", "grammar", "choice", "structural_tag"
    ]
    json_schema: NamedSchema | None = None

    regex: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    """The whole answer matches it (ECMAScript's, without lookaround and back references)."""

    grammar: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    """EBNF as in llama.cpp's GBNF; it begins at the rule `root`."""

    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    """The answer is one of these texts, sampled."""

    format: dict[str, Any] | None = None
    """Of structural_tag: xgrammar's format."""

    structures: Structures | None = None
    """With triggers vLLM's older form of a structural_tag, in place of its format."""

    triggers: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    """Texts that a structure begins with: from there on it has to follow."""

    whitespace: Whitespace | None = None
    """Between values of JSON: `spaced` (the default: a space after each comma and colon, as models
    write it), `compact` (none), or `any`."""

    any_whitespace: bool | None = None
    """True: another name of `"whitespace": "any"`."""

    @model_validator(mode="after")
    def _fits_its_type(self) -> ResponseFormat:
        needed = {"structural_tag": "format"}.get(self.type, self.type)
        names = ["json_schema", "regex", "grammar", "choice", "format", "structures", "triggers"]
        if self.type == "structural_tag" and (self.structures or self.triggers):
            needed = "structures"
            if self.triggers is None:
                raise RequestError("response_format with structures needs triggers")
            names.remove("triggers")
        contents = {name: getattr(self, name) for name in names}
        check_content("response_format", self.type, needed, contents)
        for name in ("whitespace", "any_whitespace"):
            if getattr(self, name) and not self.type.startswith("json"):
                raise RequestError(f"response_format of type {self.type} has {name}")
        if self.whitespace is not None and self.any_whitespace is not None:
            raise RequestError("response_format has whitespace and any_whitespace: give whitespace")
        return self


def whitespace_of(response_format: Mapping[str, Any]) -> Whitespace | None:
    """What a format says of whitespace between values of JSON; None: nothing."""
    if response_format.get("any_whitespace"):
        return "any"
    said: Whitespace | None = response_format.get("whitespace")
    return said


class StructuredOutputs(Object):
    """vLLM's names for the same: exactly one of the first six."""

    json_schema: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None

    @property
    def response_format(self) -> dict[str, Any]:
        """What it is as a `response_format`."""
        given = {
            name: value
            for name in type(self).model_fields
            if (value := getattr(self, name)) is not None and name != "disable_any_whitespace"
        }
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {len(given)} of json, json_object, regex, choice, grammar "
                "and structural_tag: give exactly one of them"
            )
        ((kind, value),) = given.items()
        made: dict[str, Any] = {"type": kind, kind: value}
        if kind == "json_schema":
            made["json_schema"] = {"schema": _read(value, "structured_outputs.json")}
        elif kind == "json_object":
            del made["json_object"]
        elif kind == "structural_tag":
            tag = _read(value, "structured_outputs.structural_tag")
            is_whole = tag.get("type", kind) == kind
            made = {**tag, "type": kind} if is_whole else {"type": kind, "format": tag}
        if self.disable_any_whitespace is False and kind.startswith("json"):
            made["whitespace"] = "any"
        return made


def _read(value: Any, name: str) -> Any:
    """An object that may be given as JSON."""
    if isinstance(value, str):
        try:
            value = read_json(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} is no JSON: {str(error)[:80]}") from error
        if is_deep(value):
            raise RequestError(f"{name} nests too deeply, limit is {MAX_DEPTH} levels")
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {show(value)}, expected an object")
    return value


def _as_mapping(value: Any) -> Any:
    """vLLM's own object, or any with the same attributes."""
    if value is None or isinstance(value, Mapping):
        return value
    known = [info.alias or name for name, info in StructuredOutputs.model_fields.items()]
    names = [name for name in known if hasattr(value, name)]
    return {name: getattr(value, name) for name in names} if names else value


def _structured(value: Any) -> dict[str, Any]:
    fields = {  # vLLM's object has False where nothing is asked
        name: one
        for name, one in value.items()
        if one not in (None, False) or name == "disable_any_whitespace"
    }
    return check(StructuredOutputs, fields, "structured_outputs").response_format


def _mapping(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def copied_format(value: dict[str, Any]) -> dict[str, Any]:
    """A copy of a response format, checked and otherwise as it was given."""
    check(ResponseFormat, value, "response_format")
    try:
        return deepcopy(value)
    except RecursionError as error:
        raise RequestError("response_format nests too deeply: no grammar is made of it") from error


if TYPE_CHECKING:
    Format = Mapping[str, Any]
    Structured = Any
else:
    Format = Annotated[
        dict[str, Any],
        BeforeValidator(_mapping),
        AfterValidator(copied_format),
        DescribedBy(ResponseFormat),
    ]
    Structured = Annotated[
        dict[str, Any],
        BeforeValidator(_as_mapping),
        AfterValidator(_structured),
        DescribedBy(StructuredOutputs),
    ]

"""Values that users give, declared once with pydantic: type, range, default and help.

A declaration is where the check, the sentence of the error, the OpenAPI document and the command
line's help come from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic import ValidationError as Invalid
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from onestem.beside_vllm import Name, way_out
from onestem.errors import OnestemError, RequestError

EXPECTED = "x-expected"  # in a JSON schema: what a value is to be, where its type does not say it
REF = "#/$defs/"
ITEMS = {"string": "text", "integer": "integer", "object": "object"}

Model = TypeVar("Model", bound=BaseModel)


def show(value: object) -> str:
    """`value` for an error message: its start, on one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integers of thousands of digits
        text = "a very long number"
    return text if len(text) <= 80 else text[:79] + "…"


def read_json(text: str) -> Any:
    """The value of a text of JSON. `ValueError` or `RecursionError` for anything else, for NaN and
    infinities, and for a key that occurs twice in an object: one value would be ignored."""
    return json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {show(twice)} stands twice in one object")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def plain(value: Any) -> Any:
    """Numbers of other libraries as Python's own."""
    if type(value) in (int, float, bool, str) or value is None:
        return value
    if hasattr(value, "tolist"):  # of numpy and torch: numbers, booleans, lists of them
        return value.tolist()
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


class Object(BaseModel):
    """An object of the API, read by `check`; it has no other fields."""

    model_config = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class DescribedBy:
    """In an annotation: the JSON schema is that of a model."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(self._model.__pydantic_core_schema__)


class Checked(Object):
    """A value whose fields are checked when it is made.

    Attributes:
        error: what is raised, with one line.
        beside: vLLM's names for such fields, to mention where one is given.
    """

    model_config = ConfigDict(frozen=True)
    beside: ClassVar[Mapping[str, Name]] = {}
    error: ClassVar[type[OnestemError]] = RequestError

    if not TYPE_CHECKING:  # type checkers take the fields for the arguments

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**{name: plain(value) for name, value in fields.items()})
            except Invalid as error:
                whole = type(self).__name__
                raise self.error(sentence(type(self), error, fields, whole=whole)) from None

        def __setattr__(self, name: str, value: object) -> None:
            self._check_free(name)
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            self._check_free(name)
            super().__delattr__(name)

    def _check_free(self, name: str) -> None:
        """Raise `error` for what is no private attribute of a subclass."""
        whole = type(self).__name__
        if name in type(self).model_fields:
            raise self.error(
                f"{name} of {whole} cannot be changed: replace({name}=...) gives a changed copy"
            )
        if not name.startswith("_"):
            raise self.error(f"unknown field in {whole}: {name!r}")

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again."""
        return type(self)(**{**dict(self), **changes})


def check(model: type[Model], fields: Mapping[str, Any], name: str = "") -> Model:
    """`model` of JSON fields.

    Args:
        name: what they are fields of, for errors; "": of a body.

    Raises:
        RequestError: one line that names the field, its value and what is expected.
    """
    try:
        return model.model_validate(fields)
    except Invalid as error:
        raise RequestError(sentence(model, error, fields, name)) from None


def without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body that say something: null in one means that it is not there."""
    return {name: value for name, value in body.items() if value is not None}


def check_content(what: str, kind: str, needed: str, contents: Mapping[str, object]) -> None:
    """Raise `RequestError` unless `needed` is the one field of `contents` that an object of type
    `kind` has."""
    for name, content in contents.items():
        if (name == needed) != (content is not None):
            verb = "needs" if name == needed else "has"
            raise RequestError(f"{what} of type {kind} {verb} {name}")


def sentence(
    model: type[BaseModel],
    error: Invalid,
    fields: Mapping[str, Any],
    name: str = "",
    whole: str = "body",
) -> str:
    """One line for what is wrong with `fields`. Of several errors it names the deepest: that is the
    alternative of a union that was meant."""
    problems = error.errors(include_url=False)
    placed = [(*_place(problem["loc"], fields), problem) for problem in problems]
    # A wrong type comes after others in its place: another alternative may have been meant.
    path, value, problem = max(
        placed, key=lambda one: (len(one[0]), not one[2]["type"].endswith("_type"))
    )
    mistake = (problem.get("ctx") or {}).get("error")
    if isinstance(mistake, OnestemError):
        return _of_our_own(str(mistake), path, value, name)
    if problem["type"] == "extra_forbidden":
        inside, unknown = _spelled(path[:-1], name), str(path[-1])
        hint = "" if inside else way_out(unknown, getattr(model, "beside", {}))
        return f"unknown field in {inside or whole}: {show(unknown)}{hint}"
    if problem["type"] == "missing":
        missing = str(problem["loc"][-1])
        inside = _spelled(path, name)
        return f"{inside}.{missing} is missing" if inside else f"{whole} has no {missing}"
    wanted = _schema_at(path, _schema(model))
    if problem["type"] in ("too_long", "string_too_long"):
        what = "characters" if isinstance(value, str) else _items(wanted)
        limit = (problem.get("ctx") or {})["max_length"]
        return f"{_spelled(path, name)} has {len(value)} {what}, limit is {limit}: give fewer"
    if problem["type"] == "string_unicode":
        half = f"{show(value)}, which has half a character"
        return f"{_spelled(path, name)} is {half}: give both surrogates, or none"
    expected = words(wanted) or problem["msg"][:1].lower() + problem["msg"][1:]
    return f"{_spelled(path, name)} is {show(value)}, expected {expected}"


def _of_our_own(mistake: str, path: Sequence[int | str], value: Any, name: str) -> str:
    if mistake.startswith("expected "):
        return f"{_spelled(path, name)} is {show(value)}, {mistake}"
    return f"{_spelled(path, name)}: {mistake}" if len(path) > 1 else mistake


def _place(loc: Sequence[int | str], here: Any) -> tuple[tuple[int | str, ...], Any]:
    """The keys and indices of a place, without names of a union's alternatives, and what is
    there."""
    path: list[int | str] = []
    for i, part in enumerate(loc):
        if (
            isinstance(here, Mapping)
            and here.get("type") == part
            and {*loc[i + 1 : i + 2]} & here.keys()
        ):
            continue  # the alternative's name, which may be that of a field too
        if isinstance(here, Mapping) and (part in here or str(part) in here):
            here = here[part] if part in here else here[str(part)]
        elif isinstance(here, Sequence) and not isinstance(here, str) and isinstance(part, int):
            if not 0 <= part < len(here):
                continue
            here = here[part]
        else:
            continue
        path.append(part)
    return tuple(path), here


def _spelled(path: Sequence[int | str], name: str) -> str:
    text = name
    for depth, part in enumerate(path):
        if isinstance(part, int) or (depth and not part.isidentifier()):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


@cache
def _schema(model: type[BaseModel]) -> Any:
    """A model's JSON schema, in which definitions are in the places of references to them."""
    schema = model.model_json_schema(by_alias=True)
    definitions = schema.pop("$defs", {})

    def inlined(part: Any) -> Any:
        if isinstance(part, list):
            return [inlined(one) for one in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inlined(definitions[part["$ref"].removeprefix(REF)])
        return {name: inlined(one) for name, one in part.items()}

    return inlined(schema)


def _schema_at(path: Sequence[int | str], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a JSON schema says of a place; {}: nothing."""
    if not path:
        return schema
    part, *rest = path
    if isinstance(part, str) and part in schema.get("properties", {}):
        return _schema_at(rest, schema["properties"][part])
    inside = [schema["items"]] if "items" in schema and isinstance(part, int) else []
    inside += schema.get("patternProperties", {}).values()
    if isinstance(schema.get("additionalProperties"), Mapping):
        inside.append(schema["additionalProperties"])
    if inside:
        return _schema_at(rest, inside[0])
    options = (*schema.get("anyOf", ()), *schema.get("oneOf", ()))
    return next(filter(None, (_schema_at(path, one) for one in options)), {})


def words(schema: Mapping[str, Any]) -> str:
    """What a JSON schema without references asks for, as the end of a sentence: "an integer from 1
    to 1024"."""
    if EXPECTED in schema:
        return str(schema[EXPECTED])
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return _any_of([str(value) for value in schema["enum"]])
    options = schema.get("anyOf", schema.get("oneOf", ()))
    if options:
        told = [words(one) for one in options if one.get("type") != "null"]
        return _any_of(list(dict.fromkeys(told)))
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return _range("an integer" if kind == "integer" else "a number", schema)
    if kind == "array":
        if schema.get("maxItems") == 0:
            return "an empty list"
        item = ITEMS.get(str(schema.get("items", {}).get("type")), "value")
        return f"a list of at least one {item}" if schema.get("minItems") else f"a list of {item}s"
    if kind == "string":
        return "non-empty text" if schema.get("minLength") == 1 else "text"
    return {"boolean": "true or false", "object": "an object", "null": "null"}.get(str(kind), "")


def _items(schema: Mapping[str, Any]) -> str:
    """What a list is of, in the plural."""
    lists = [one for one in (schema, *schema.get("anyOf", ())) if "items" in one]
    item = lists[0]["items"] if lists else {}
    if "title" in item:
        return " ".join(re.findall("[A-Z][a-z]*", item["title"])).lower() + "s"
    return ITEMS.get(str(item.get("type")), "value") + "s"


def _any_of(told: Sequence[str]) -> str:
    *first, last = told
    return f"{', '.join(first)} or {last}" if first else last


def _range(what: str, schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if above is not None:
        end = "" if below is None else f" and below {below:g}"
        return f"{what} above {above:g}" + (f" and at most {high:g}" if high is not None else end)
    if low is not None and high is not None:
        return f"{what} from {_figure(low)} to {_figure(high)}"
    if low is not None:
        return f"{what} of at least {_figure(low)}"
    return f"{what} of at most {_figure(high)}" if high is not None else what


def _figure(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}".replace("e-0", "e-")

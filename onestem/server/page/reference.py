"""The page at /docs: the OpenAPI document for people, in one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from onestem.checked import EXPECTED, words

HERE = Path(__file__).parent
STATIC = HERE / "static"
STYLES = (STATIC / "page.css", HERE / "reference.css")  # that of the page at /, and its own
REF = "#/components/schemas/"
Json = Mapping[str, Any]


def api_page(document: Json) -> tuple[str, dict[str, str]]:
    """The page, and its headers, which allow no script and no style but its own."""
    style = "".join(path.read_text() for path in STYLES)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    environment = Environment(autoescape=True, loader=FileSystemLoader(HERE))
    environment.filters |= {"prose": _prose, "kind": kind_of, "body": body_name}
    schemas = dict(objects_of(document["components"]["schemas"]))
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    bodies = {body_name(operation) for _, _, operation in operations}
    html = environment.get_template("reference.html").render(
        document=document,
        operations=operations,
        schemas=schemas,
        objects={name: one for name, one in schemas.items() if name not in bodies},
        style=Markup(style),
        icon=quote((STATIC / "icon.svg").read_text()),
    )
    return html, {"Content-Security-Policy": policy}


def objects_of(schemas: Json) -> Iterator[tuple[str, Json]]:
    """Schemas of objects by their names, with nested ones."""
    yield from schemas.items()
    inside: list[Any] = list(schemas.values())
    while inside:
        here = inside.pop()
        if isinstance(here, list):
            inside += here
        elif isinstance(here, dict):
            inside += here.values()
            if _is_object(here) and here["title"] not in schemas:
                yield here["title"], here


def _is_object(schema: Json) -> bool:
    return schema.get("type") == "object" and "properties" in schema and "title" in schema


def body_name(operation: Json) -> str | None:
    """Name of the schema of an operation's body."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        return str(content["schema"]["$ref"]).removeprefix(REF)
    return None


def _prose(text: str) -> Markup:
    """Text whose parts between backticks are code."""
    parts = str(escape(text)).split("`")
    return Markup("".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(parts)))


def kind_of(schema: Json) -> Markup:
    """Type and range of a value; objects are links."""
    if "$ref" in schema or _is_object(schema):
        name = schema["title"] if "title" in schema else schema["$ref"].removeprefix(REF)
        return Markup('<a href="#{0}">{0}</a>').format(name)
    if EXPECTED in schema and '"$ref"' not in json.dumps(schema):
        return escape(schema[EXPECTED])
    options = schema.get("anyOf", schema.get("oneOf", ()))
    if options:
        kinds = [kind_of(one) for one in options if one.get("type") != "null"]
        return Markup(" or ").join(dict.fromkeys(kinds))
    if schema.get("items") and schema.get("maxItems") != 0:
        count = _limits(schema, "minItems", "maxItems", "")
        return Markup("list of {}{}").format(kind_of(schema["items"]), count)
    if isinstance(schema.get("additionalProperties"), dict):
        return Markup("object of {}").format(kind_of(schema["additionalProperties"]))
    told = words(schema) or "any value"
    if "const" in schema:
        told = f"only {told}"
    told += (
        _limits(schema, "minLength", "maxLength", " characters") if "maxLength" in schema else ""
    )
    if "pattern" in schema:
        told += f", matches {schema['pattern']}"
    return escape(told)


def _limits(schema: Json, low: str, high: str, what: str) -> str:
    """ ", 1 to 5 characters", as far as there are any."""
    least, most = schema.get(low), schema.get(high)
    if most is None:
        return f", at least {least}{what}" if least else ""
    if least == most:
        return f", {most}{what}"
    return f", {least} to {most}{what}" if least else f", at most {most}{what}"

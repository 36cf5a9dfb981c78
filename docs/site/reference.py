"""Pages of the site that are made of declarations: the HTTP API, and vLLM's names.

They are written into docs/reference/ when the site is built; git does not keep them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from onestem.beside_vllm import (
    ARGUMENTS,
    ENGINE,
    FIELDS,
    METHODS,
    ROUTES,
    SAMPLING,
    SERVE,
    Name,
)
from onestem.server.api.openapi import document
from onestem.server.api.routes import api, open_routes, tokens
from onestem.server.page.reference import body_name, kind_of, objects_of

__all__ = ["write_reference"]

WRITTEN = "<!-- Written by docs/site/reference.py. -->\n\n"


def write_reference(folder: Path) -> None:
    """Write the pages; a page that says the same already keeps its time."""
    pages = {
        "http": http_page(),
        "vllm-sampling": vllm_table(SAMPLING),
        "vllm-engine": vllm_table(ENGINE),
        "vllm-serve": vllm_table(SERVE),
        "vllm-arguments": vllm_table(ARGUMENTS),
        "vllm-methods": vllm_table(METHODS),
        "vllm-routes": vllm_table(ROUTES),
        "vllm-fields": vllm_table(FIELDS),
    }
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heads), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(map(cell, line)) + " |\n" for line in lines)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def http_page() -> str:
    """Routes and fields, from the OpenAPI document."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for routes in (api, tokens, open_routes):
        app.include_router(routes)
    made = document(app, keys=False)
    return "".join([WRITTEN, "# HTTP API\n\n", *_http(made)])


def _http(made: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "What a server says of itself at `/openapi.json` and `/docs`. [The server](../server.md) "
        "explains it. A field that is `null` is not there. Unknown fields are refused. Fields "
        "that allow one value are there for clients that send it.\n\n"
    )
    operations = (
        (method.upper(), path, operation)
        for path, methods in made["paths"].items()
        for method, operation in methods.items()
    )
    yield table(("", "", "body or query"), (_operation(*one) for one in operations))
    schemas = dict(objects_of(made["components"]["schemas"]))
    shared = _shared(schemas)
    for owners, fields in shared.items():
        yield f"\n## {words_of(owners)}\n\nEach has these fields.\n\n"
        yield table(("field", "value", "default", ""), _rows(fields, ()))
    for name, schema in schemas.items():
        known = {field for owners, found in shared.items() if name in owners for field in found}
        own = {one: told for one, told in schema["properties"].items() if one not in known}
        yield f"\n## {name}\n\n"
        links = [f"[{words_of(owners)}](#{anchor(owners)})" for owners in shared if name in owners]
        said = schema.get("description", "").strip()
        if links:
            said = f"{said}\n\nFurther fields: {'; '.join(links)}.".strip()
        yield f"{said}\n\n" if said else ""
        yield table(("field", "value", "default", ""), _rows(own, schema.get("required", ())))


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> tuple[str, str, str]:
    """A row: the route, what it does, and what it takes besides what its path names."""
    takes = [
        f"`{one['name']}`: {linked(one['schema'])}"
        for one in operation.get("parameters", ())
        if one["in"] != "path"
    ]
    body = body_name(operation)
    if body:
        takes.append(f"[{body}](#{body.lower()})")
    return f"{method} `{path}`", operation.get("description", ""), "; ".join(takes)


def _shared(schemas: Mapping[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Fields that several bodies declare alike, by these bodies' names."""
    owners: dict[str, list[str]] = {}
    told_of: dict[str, tuple[str, Any]] = {}
    for name, schema in schemas.items():
        if name.endswith("Body"):
            for field, told in schema["properties"].items():
                key = json.dumps([field, told], sort_keys=True)
                owners.setdefault(key, []).append(name)
                told_of[key] = field, told
    shared: dict[tuple[str, ...], dict[str, Any]] = {}
    for key, names in owners.items():
        if len(names) > 1:
            field, told = told_of[key]
            shared.setdefault(tuple(names), {})[field] = told
    return {
        names: fields
        for names, fields in shared.items()
        if any("description" in told for told in fields.values())
    }


def _rows(fields: Mapping[str, Any], needed: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Rows of a table; fields that take the same single value share one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for field, told in fields.items():
        default = "" if told.get("default") is None else f"`{told['default']}`"
        said = linked(told), default, told.get("description", "")
        named = f"`{field}`" + (" (required)" if field in needed else "")
        is_single = said[0].startswith(("only ", "null")) and not said[2]
        rows.setdefault(said if is_single else (*said, field), []).append(named)
    for said, names in rows.items():
        yield ", ".join(names), *said[:3]


def words_of(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]])


def anchor(names: Sequence[str]) -> str:
    return words_of(names).lower().replace(",", "").replace(" ", "-")


def linked(schema: Mapping[str, Any]) -> str:
    """Type and range of a value; objects are links to their headings."""
    html = str(kind_of(schema))
    return re.sub(r'<a href="#(\w+)">\w+</a>', lambda m: f"[{m[1]}](#{m[1].lower()})", html)


def vllm_table(names: Mapping[str, Name]) -> str:
    """Names of which the same is said share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, told in names.items():
        here = f"`{told.ours}`"
        if told.ours is None or told.ours == name:
            here = "refused" if told.ours is None else "the same"
        rows.setdefault((here, told.note), []).append(f"`{name}`")
    listed = ((", ".join(found), *said) for said, found in rows.items())
    return WRITTEN + table(("vLLM", "Onestem", "what differs"), listed)

"""Pages of the site that are made of declarations: options, the HTTP API, and vLLM's names.

They are written into docs/reference/ when the site is built; git does not keep them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
from onestem.checked import words
from onestem.options import EngineOptions, Options
from onestem.request import SamplingParams
from onestem.server.api.app import api, open_routes, tokens
from onestem.server.api.openapi import document
from onestem.server.page.reference import body_name, kind_of, objects_of
from onestem.server.settings import Settings

__all__ = ["write_reference"]

WRITTEN = "<!-- Written by docs/site/reference.py. -->\n\n"


def write_reference(folder: Path) -> None:
    """Write the pages; a page that says the same already keeps its time."""
    pages = {
        "options": options_page(),
        "http": http_page(),
        "vllm-sampling": vllm_table(SAMPLING, SamplingParams),
        "vllm-engine": vllm_table(ENGINE, EngineOptions),
        "vllm-serve": vllm_table(SERVE, Settings),
        "vllm-arguments": vllm_table(ARGUMENTS, None),
        "vllm-methods": vllm_table(METHODS, None),
        "vllm-routes": vllm_table(ROUTES, None),
        "vllm-fields": vllm_table(FIELDS, None),
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


def options_page() -> str:
    parts = [
        WRITTEN,
        "# All options\n\n",
        "Each is declared once. [Options](../options.md) says which place goes before which.\n\n",
        "## Of the engine\n\nFields of `EngineOptions`, which are also `LLM`'s arguments.\n\n",
        options_table(EngineOptions),
        "\n## Of the server\n\nOf `onestem serve`, beside those of the engine.\n\n",
        options_table(Settings),
    ]
    return "".join(parts)


def options_table(kind: type[Options]) -> str:
    properties = kind.model_json_schema()["properties"]
    rows = (
        (
            f"`{name}`",
            f"`--{flag}`",
            f"`{kind.variable(name)}`",
            literal_of(kind.model_fields[name].get_default(call_default_factory=True)),
            words(properties[name]) or "any value",
            kind.model_fields[name].description or "",
        )
        for name, flag in kind.offered().items()
    )
    return table(("field", "option", "variable", "default", "value", ""), rows)


def literal_of(value: object) -> str:
    return "" if value in (None, ()) else f"`{value}`"


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
        "explains it. A field that is `null` is not there. Unknown fields are refused.\n\n"
    )
    schemas = dict(objects_of(made["components"]["schemas"]))
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            yield f"## {method.upper()} `{path}`\n\n{operation.get('description', '')}\n\n"
            rows = (
                (f"`{one['name']}`", f"in the {one['in']}", linked(one["schema"]))
                for one in operation.get("parameters", ())
            )
            found = list(rows)
            if found:
                yield table(("parameter", "", "value"), found) + "\n"
            body = body_name(operation)
            if body:
                yield f"Body: [{body}](#{body.lower()})\n\n"
    for name, schema in schemas.items():
        needed = schema.get("required", ())
        rows = (
            (
                f"`{field}`" + (" (required)" if field in needed else ""),
                linked(told),
                "" if told.get("default") is None else f"`{told['default']}`",
                told.get("description", ""),
            )
            for field, told in schema.get("properties", {}).items()
        )
        yield f"## {name}\n\n{schema.get('description', '')}\n\n"
        yield table(("field", "value", "default", ""), rows) + "\n"


def linked(schema: Mapping[str, Any]) -> str:
    """Type and range of a value; objects are links to their headings."""
    html = str(kind_of(schema))
    return re.sub(r'<a href="#(\w+)">\w+</a>', lambda m: f"[{m[1]}](#{m[1].lower()})", html)


def vllm_table(names: Mapping[str, Name], kind: type[Any] | None) -> str:
    fields = {} if kind is None else kind.model_json_schema()["properties"]
    rows = ((f"`{name}`", *_ours(name, told, fields)) for name, told in names.items())
    return WRITTEN + table(("vLLM", "Onestem", "what differs"), rows)


def _ours(name: str, told: Name, fields: Mapping[str, Any]) -> tuple[str, str]:
    if told.ours is None:
        return "refused", told.note
    here = "the same" if told.ours == name else f"`{told.ours}`"
    value = words(fields[told.ours]) if told.ours in fields else ""
    return here, "; ".join(part for part in (value, told.note) if part)

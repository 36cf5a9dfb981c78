"""Tools of BFCL, the Berkeley leaderboard of function calls: questions, and parameters as JSON
schemas."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["response_format", "tools_of_bfcl"]


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}


def tools_of_bfcl() -> list[tuple[str, dict]]:
    """The question of each line, and the parameters of its tool as a JSON schema."""
    found = find_spec("bfcl_eval")
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin).parent / "data" / "BFCL_v4_simple_python.json"
    tools = []
    for line in file.read_text().splitlines():
        told = json.loads(line)
        (function,) = told["function"]
        tools.append((told["question"][0][-1]["content"], as_schema(function["parameters"])))
    return tools


def as_schema(value):
    """BFCL's types by their names in JSON schemas."""
    names = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
    if isinstance(value, dict):
        return {
            key: names.get(one, one) if key == "type" and isinstance(one, str) else as_schema(one)
            for key, one in value.items()
        }
    return [as_schema(one) for one in value] if isinstance(value, list) else value

"""Where the data of BFCL is, the Berkeley leaderboard of function calls, and its schemas."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["as_schema", "data_folder"]

# The names of BFCL's types in JSON schemas (its `GORILLA_TO_OPENAPI`, and what that leaves out).
TYPES = {
    "dict": "object", "HashMap": "object", "Hashtable": "object",
    "float": "number", "double": "number",
    "byte": "integer", "short": "integer", "long": "integer", "Bigint": "integer",
    "tuple": "array", "list": "array", "ArrayList": "array", "Array": "array", "Queue": "array",
    "Stack": "array",
    "any": "string", "Any": "string", "String": "string", "char": "string", "": "string",
    "bool": "boolean", "Boolean": "boolean",
}  # fmt: skip


def data_folder() -> Path:
    """The folder of the installed package's data."""
    found = find_spec("bfcl_eval")
    if found is None or found.origin is None:
        raise SystemExit("bfcl-eval is not installed: pip install --no-deps bfcl-eval")
    return Path(found.origin).parent / "data"


def as_schema(value: Any) -> Any:
    """BFCL's types by their names in JSON schemas."""
    if isinstance(value, dict):
        return {
            key: TYPES.get(one, one) if key == "type" and isinstance(one, str) else as_schema(one)
            for key, one in value.items()
        }
    return [as_schema(one) for one in value] if isinstance(value, list) else value

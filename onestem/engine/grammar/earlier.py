"""Formats as versions read them in which JSON was compact unless a format said otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onestem.engine.grammar.tags import changed, tags_of
from onestem.request import whitespace_of

__all__ = ["as_earlier"]


def as_earlier(response_format: Mapping[str, Any]) -> dict[str, Any]:
    """A format that asks for what it meant to them.

    Args:
        response_format: of a request that is not answered yet. In structural tags of theirs,
            `spaced` (true) is what `"whitespace": "spaced"` is now.
    """
    made = dict(response_format)
    kind = made["type"]
    if kind == "structural_tag":
        return {"type": kind, "format": changed(tags_of(made), _compact)}
    if kind.startswith("json") and whitespace_of(made) is None:
        made |= {"whitespace": "compact", "any_whitespace": None}
    return made


def _compact(one: dict[str, Any]) -> dict[str, Any]:
    if one.get("type") != "json_schema":
        return one
    spaced = one.pop("spaced", False)
    if one.get("style", "json") != "json":
        return one
    return {"whitespace": "spaced" if spaced else "compact", **one}

"""The families whose chat templates say how they write calls and reasoning: those of families.toml,
which shows what they look like."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onestem.openai.forms.form import Braces, Channels, Fields, Form, Reasoning

# What `$...` stands for in patterns.
_PARTS = {
    "$NAME": r'\{\s*"name"\s*:\s*"(?P<name>(?:[^"\\]|\\.)+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*',
    "$WORD": r"(?P<name>[\w.-]+)",
}
_PATTERNS = ("head", "item", "header")
# Fields that are objects, by their names in the file.
_OBJECTS = {
    "fields": ("arguments", Fields),
    "braces": ("arguments", Braces),
    "reasoning": ("reasoning", Reasoning),
    "channels": ("channels", Channels),
}


def _read(told: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a form, or of an object in one."""
    fields: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, dict):
            name, kind = _OBJECTS[name]
            fields[name] = kind(**_read(value))
        elif name in _PATTERNS:
            for part, pattern in _PARTS.items():
                value = value.replace(part, pattern)
            fields[name] = re.compile(value)
        elif isinstance(value, list):
            fields[name] = tuple(tuple(one) if isinstance(one, list) else one for one in value)
        else:
            fields[name] = value
    return fields


_TOLD = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_SEEN = {name: told.pop("seen") for name, told in _TOLD.items()}
FORMS = tuple(
    Form(name=name, **_read(_TOLD.get(told.pop("like", ""), {}) | told))
    for name, told in _TOLD.items()
)
NAMED = {form.name: form for form in FORMS}
GENERIC = replace(NAMED["hermes"], name="generic")


def form_of(template: str) -> Form | None:
    """The form of calls in a chat template; None: it has no calls, or calls of another form."""
    for form in FORMS:
        if any(all(mark in template for mark in marks) for marks in _SEEN[form.name]):
            return form
    if "tools" in template and re.search(r'\{"name":[^{]{0,60}"parameters":', template):
        return NAMED["llama3"]
    return None


_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


def reasoning_of(template: str) -> Reasoning | None:
    """The form of reasoning in a chat template that names both of its marks; None: it has none."""
    for begin, end in _TAGS:
        if begin in template and end in template:
            return Reasoning.tagged(begin, end)
    return None


def described(template: str) -> tuple[Form, bool]:
    """The form that a model with this template is held to, and whether its template has it."""
    form = form_of(template)
    known = form or GENERIC
    if known.reasoning is None and known.channels is None:
        known = replace(known, reasoning=reasoning_of(template))
    return known, form is not None

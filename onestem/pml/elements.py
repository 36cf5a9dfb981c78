"""Turns an element of the markup, with its attributes and content, into a node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onestem.pml.files import read_source
from onestem.pml.nodes import (
    ROLES,
    Argument,
    Import,
    Module,
    Node,
    Parameter,
    Prompt,
    Role,
    Schema,
    Text,
    Union,
)
from onestem.pml.place import Place, PmlError, show
from onestem.pml.whitespace import Fragment, clean

Item = Fragment | Parameter | Module | Union | Role | Import


@dataclass
class Element:
    """An element that is still open."""

    tag: str
    attributes: dict[str, str]
    at: Place
    preserve: bool
    items: list[Item] = field(default_factory=list)

    def take(self, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, str]:
        """The element's attributes; a missing or unknown one is refused."""
        known = [*required, *optional]
        for name in self.attributes:
            if name not in known:
                expected = ", ".join(known) or "none"
                raise PmlError(
                    f"<{self.tag}> has no attribute {name!r}, expected: {expected}", self.at
                )
        for name in required:
            if name not in self.attributes:
                raise PmlError(f'<{self.tag}> has no {name}: write {name}="..."', self.at)
        return self.attributes

    def children(self) -> list[Node]:
        """Nodes in the element; texts follow the whitespace rule."""
        found: list[Node] = []
        stretch: list[Fragment | Parameter] = []
        for item in self.items:
            if isinstance(item, (Fragment, Parameter)):
                stretch.append(item)
            else:
                found += [*clean(stretch, preserve=self.preserve), item]
                stretch = []
        return [*found, *clean(stretch, preserve=self.preserve)]


def node_of(element: Element, folder: Path | None) -> Item | Schema | Prompt:
    """The node of an element that is closed. `folder`: what `src` is relative to.

    Raises:
        PmlError: an attribute or the content is wrong.
    """
    tag, at = element.tag, element.at
    if tag == "schema":
        given = element.take(["name"], ["separator"])
        return Schema(given["name"], element.children(), given.get("separator", "\n"), at=at)
    if tag == "prompt":
        return Prompt(element.take(["schema"])["schema"], element.children(), at=at)
    if tag == "module":
        return _module(element, folder)
    if tag in ("parameter", "param"):
        return _parameter(element)
    if tag == "union":
        element.take([])
        return Union(element.children(), at=at)
    if tag in ROLES:
        element.take([])
        return Role(tag, element.children(), at=at)
    arguments = [Argument(name, value, at=at) for name, value in element.attributes.items()]
    return Import(tag, arguments, element.children(), at=at)


def _module(element: Element, folder: Path | None) -> Module:
    given = element.take(["name"], ["cache", "src"])
    cache = given.get("cache", "true")
    if cache not in ("true", "false"):
        raise PmlError(f"cache is {cache!r}, expected true or false", element.at)
    body = element.children()
    if "src" in given:
        if body:
            raise PmlError(
                f"module {given['name']} has src and content: keep one of the two", element.at
            )
        text, at = read_source(given["src"], folder, element.at)
        body = [Text(text, at=at)]
    return Module(given["name"], body, cache == "true", at=element.at)


def _parameter(element: Element) -> Parameter:
    given = element.take(["name"], ["length", "len", "default"])
    lengths = [given[form] for form in ("length", "len") if form in given]
    if len(lengths) != 1:
        raise PmlError(
            f"parameter {given['name']} has {'two lengths' if lengths else 'no length'}: write "
            'length="N", the maximum tokens of an argument',
            element.at,
        )
    if element.children():
        raise PmlError(
            f'parameter {given["name"]} has content: a default is written default="..."',
            element.at,
        )
    digits = re.fullmatch(r"\s*([0-9]{1,9})\s*", lengths[0])
    if digits is None:
        raise PmlError(
            f"length of parameter {given['name']} is {show(lengths[0])}, expected a number of "
            "tokens",
            element.at,
        )
    default = given.get("default")
    return Parameter(given["name"], int(digits.group(1)), default, at=element.at)

"""Writes nodes as markup that parses to the same nodes, whatever whitespace their texts have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from onestem.pml.nodes import Import, Module, Node, Parameter, Prompt, Role, Schema, Text, Union
from onestem.pml.place import PmlError, show

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "\r": "&#13;"}
_ATTRIBUTE_ESCAPES = {**_ESCAPES, '"': "&quot;", "\n": "&#10;", "\t": "&#9;"}


def to_markup(document: Schema | Prompt) -> str:
    """Markup of a schema or a prompt, with `xml:space="preserve"`: all whitespace is text.

    Raises:
        PmlError: a text has a character that XML does not have.
    """
    if isinstance(document, Schema):
        attributes = {"name": document.name}
        if document.separator != "\n":
            attributes["separator"] = document.separator
        return _element("schema", {**attributes, "xml:space": "preserve"}, document.body)
    return _element("prompt", {"schema": document.schema, "xml:space": "preserve"}, document.body)


def _element(tag: str, attributes: Mapping[str, str], body: Sequence[Node | str]) -> str:
    written = "".join(
        f' {name}="{_escaped(value, _ATTRIBUTE_ESCAPES)}"' for name, value in attributes.items()
    )
    content = "".join(map(_node, body))
    return f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>"


def _node(node: Node | str) -> str:
    match node:
        case Text():
            return _escaped(node.text, _ESCAPES)
        case Parameter():
            default = {} if node.default is None else {"default": node.default}
            return _element(
                "parameter", {"name": node.name, "length": str(node.length), **default}, ()
            )
        case Module():
            uncached = {} if node.cache else {"cache": "false"}
            return _element("module", {"name": node.name, **uncached}, node.body)
        case Union():
            return _element("union", {}, node.body)
        case Role():
            return _element(node.role, {}, node.body)
        case Import():
            values = {a.name: a.value for a in node.arguments if not isinstance(a, str)}
            return _element(node.name, values, node.body)
    raise TypeError(f"{type(node).__name__} is no node")


def _escaped(text: str, escapes: Mapping[str, str]) -> str:
    forbidden = _FORBIDDEN.search(text)
    if forbidden:
        raise PmlError(
            f"text {show(text)} has the character U+{ord(forbidden.group()):04X}, which markup "
            "cannot have: leave it out, or put the text into a file (src)"
        )
    return "".join(escapes.get(character, character) for character in text)

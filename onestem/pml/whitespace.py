"""Which whitespace of the markup is text. One rule, for every stretch of text between two tags.

A *stretch* reaches from one tag to the next; `<parameter>` is part of it like a word. These parts
of a stretch are the file's layout and not text:

* whitespace at both ends,
* the indentation that its lines have in common (the first, right after a tag, has none),
* and whitespace at the ends of its lines.

All else is text: line breaks, empty lines, further indentation. A line with nothing but comments is
dropped. Characters written as references (`&#10;`, `&#32;`) are always text, and so is everything
in an element with `xml:space="preserve"`. CDATA only saves escaping.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from onestem.pml.nodes import Parameter, Text
from onestem.pml.place import Place


class FragmentKind(Enum):
    """How characters of a stretch were written."""

    TEXT = "text"
    REFERENCE = "reference"
    COMMENT = "comment"


@dataclass(frozen=True)
class Fragment:
    """Consecutive characters of a stretch, all written in the same way."""

    kind: FragmentKind
    text: str
    at: Place


Item = Fragment | Parameter

# Each stands for one item; neither may occur in XML.
_OBJECT, _COMMENT = "\x01", "\x02"
_BLANK = " \t"
_COMMENTS_ALONE = re.compile(r"[ \t]*\x02[ \t\x02]*")


def clean(stretch: Sequence[Item], *, preserve: bool) -> list[Text | Parameter]:
    """Texts and parameters of a stretch, without the file's layout."""
    working = "".join(map(_symbol, stretch))
    working = working.replace(_COMMENT, "") if preserve else _without_layout(working)
    head, *tails = working.split(_OBJECT)
    texts, parameters = [head], []  # a text before each parameter, and one after the last
    for item, tail in zip(filter(_is_object, stretch), tails, strict=True):
        if isinstance(item, Parameter):
            parameters.append(item)
            texts.append(tail)
        else:
            texts[-1] += item.text + tail
    first, *later = (Text(t, at=at) for t, at in zip(texts, _places(stretch), strict=True))
    nodes: list[Text | Parameter] = [first]
    for parameter, text in zip(parameters, later, strict=True):
        nodes += [parameter, text]
    return [node for node in nodes if not isinstance(node, Text) or node.text]


def _is_object(item: Item) -> bool:
    return isinstance(item, Parameter) or item.kind is FragmentKind.REFERENCE


def _symbol(item: Item) -> str:
    if _is_object(item):
        return _OBJECT
    assert isinstance(item, Fragment)
    return _COMMENT if item.kind is FragmentKind.COMMENT else item.text


def _without_layout(working: str) -> str:
    first, *rest = working.split("\n")
    rest = [line for line in rest if not _COMMENTS_ALONE.fullmatch(line)]
    first, *rest = [line.replace(_COMMENT, "") for line in (first, *rest)]
    indents = [line[: len(line) - len(line.lstrip(_BLANK))] for line in rest if line.strip(_BLANK)]
    common = len(os.path.commonprefix(indents))  # noqa: RUF071 - characters are meant
    rest = [line[common:] if line.strip(_BLANK) else "" for line in rest]
    lines = [first.lstrip(_BLANK), *rest]
    return "\n".join(line.rstrip(_BLANK) for line in lines).strip("\n")


def _places(stretch: Iterable[Item]) -> list[Place | None]:
    """Where the text before, between and after the parameters begins."""
    places: list[Place | None] = [None]
    for item in stretch:
        if isinstance(item, Parameter):
            places.append(None)
        elif places[-1] is None and (_is_object(item) or item.text.strip()):
            places[-1] = item.at
    return places

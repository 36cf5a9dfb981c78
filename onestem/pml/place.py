"""A place in a source file, and the error that names it."""

from __future__ import annotations

from typing import NamedTuple

from onestem.errors import RequestError


class Place(NamedTuple):
    """A character of a file; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class PmlError(RequestError):
    """Markup that cannot be used: one line with the place, the fault and the way out.

    Attributes:
        at: the place; None for nodes that were built in code.
    """

    def __init__(self, message: str, at: Place | None = None) -> None:
        super().__init__(message if at is None else f"{at}: {message}")
        self.at = at


def show(text: str, limit: int = 40) -> str:
    """The beginning of a text for a message, quoted and on one line."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")

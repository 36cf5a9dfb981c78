"""What vLLM calls things, and what they are here.

Errors read the tables of beside_vllm.toml where somebody gives a name of vLLM's, and
docs/from-vllm.md is made of them. Tests hold our side to the declarations.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from onestem.errors import UnsupportedError

P = ParamSpec("P")
Result = TypeVar("Result")


class Name(NamedTuple):
    """What a name of vLLM's is here.

    Attributes:
        ours: our name; None: it is refused.
        note: what differs, or the way out. Names of ours are in backticks.
    """

    ours: str | None
    note: str = ""


def _names(entries: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Name]]:
    """One table of the file; the head of the file says what an entry is."""
    for entry in entries:
        note = entry.get("note", "")
        if "name" in entry:
            yield entry["name"], Name(entry["here"], note)
        yield from ((name, Name(name, note)) for name in entry.get("same", ()))
        yield from ((name, Name(None, note)) for name in entry.get("refused", ()))


_TABLES = {
    title: dict(_names(entries))
    for title, entries in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text("utf-8")
    ).items()
}
SAMPLING, ENGINE, SERVE = _TABLES["sampling"], _TABLES["engine"], _TABLES["serve"]
FIELDS, ROUTES = _TABLES["fields"], _TABLES["routes"]
ARGUMENTS, METHODS = _TABLES["arguments"], _TABLES["methods"]


def way_out(
    name: str, table: Mapping[str, Name], spelled: Callable[[str], str] = lambda ours: ours
) -> str:
    """The end of an error's line for a name that is not there; "": it is not one of vLLM's.

    Args:
        spelled: makes of a name of ours what the reader types.
    """
    told = table.get(name)
    if told is None or told.ours == name:
        return ""
    here = [] if told.ours is None else [f"here it is {spelled(told.ours)}"]
    note = re.sub(r"`([^`]+)`", lambda one: spelled(one[1]), told.note)
    return f" (vLLM's): {'; '.join([*here, note] if note else here)}"


def refuses_vllms(method: Callable[P, Result]) -> Callable[P, Result]:
    """Refuse arguments of a method that vLLM's has, with the way out."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        for name in kwargs:
            if name in ARGUMENTS and ARGUMENTS[name].ours is None:
                hint = way_out(name, ARGUMENTS)
                raise UnsupportedError(f"{method.__name__} has no argument {name!r}{hint}")
        return method(*args, **kwargs)

    return call


class MissingMethodError(UnsupportedError, AttributeError):
    """A method of vLLM's that is not there; `hasattr` says so too."""


class Beside:
    """A class that says the way out where a method of vLLM's is asked for."""

    if not TYPE_CHECKING:  # type checkers know what is there

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property, in which an attribute was missing
                return object.__getattribute__(self, name)  # says which
            hint = way_out(name, METHODS)
            error = MissingMethodError if hint else AttributeError
            raise error(f"{type(self).__name__} has no attribute {name!r}{hint}")

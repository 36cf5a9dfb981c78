"""The nodes of schemas and prompts: frozen values, built in code or parsed from markup.

Comparisons ignore places in files. Bodies are canonical (neighbouring texts are joined, empty ones
removed), so a schema that was built in code equals the one parsed from its markup. Text is
unchanged here: the parser applies the whitespace rule of markup (`onestem.pml.whitespace`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

from onestem.pml.place import Place, PmlError, show

ROLES = ("system", "user", "assistant")
RESERVED = frozenset({"schema", "prompt", "module", "union", "parameter", "param", *ROLES})
MAX_PARAMETER = 1 << 20  # tokens
_NAME = re.compile(r"[^\W\d][\w.\-]*")


@dataclass(frozen=True)
class _Placed:
    """What may have been read from a file. `at`: where it begins there."""

    at: Place | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Text(_Placed):
    """Characters, unchanged."""

    text: str

    def __post_init__(self) -> None:
        _check_text("text", self.text, self.at)


@dataclass(frozen=True)
class Parameter(_Placed):
    """A placeholder of `length` positions, for an argument of at most `length` tokens.

    Without `default`, an import of its module must give an argument.
    """

    name: str
    length: int
    default: str | None = None

    def __post_init__(self) -> None:
        _check_name("parameter", self.name, self.at)
        whole = isinstance(self.length, int) and not isinstance(self.length, bool)
        if not whole or not 1 <= self.length <= MAX_PARAMETER:
            raise PmlError(
                f"length of parameter {self.name} is {self.length!r}, expected an integer from 1 "
                f"to {MAX_PARAMETER} (tokens)",
                self.at,
            )
        if self.default is not None:
            _check_text(f"default of parameter {self.name}", self.default, self.at)


@dataclass(frozen=True)
class Module(_Placed):
    """Text that prompts may import; it is always at the same positions.

    Attributes:
        body: texts, parameters, and further modules and unions.
        cache: False: the module's own text is computed for each request. Nested modules have a
            `cache` of their own.
    """

    name: str
    body: Sequence[Node | str] = ()
    cache: bool = True

    def __post_init__(self) -> None:
        _check_name("module", self.name, self.at)
        if self.name in RESERVED:
            raise PmlError(
                f"module name {self.name!r} is a tag of the language: choose another", self.at
            )
        _set_body(self, f"module {self.name}", (Text, Parameter, Module, Union))
        _check_names(self.parameters, f"module {self.name}")

    @property
    def parameters(self) -> list[Parameter]:
        """The module's own parameters, in order."""
        return [node for node in self.body if isinstance(node, Parameter)]

    @cached_property
    def members(self) -> dict[str, Member]:
        """The modules directly in this one, by name."""
        return _members(self.body)


@dataclass(frozen=True)
class Union(_Placed):
    """Modules of which a prompt imports at most one; they start at the same position."""

    body: Sequence[Node]

    def __post_init__(self) -> None:
        _set_body(self, "a union", (Module,))
        if not self.body:
            raise PmlError("union is empty, expected one <module> at least: add one", self.at)


@dataclass(frozen=True)
class Role(_Placed):
    """A turn of a conversation, or a part of one: `system`, `user` or `assistant`."""

    role: str
    body: Sequence[Node | str] = ()

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise PmlError(f"role is {self.role!r}, expected one of {', '.join(ROLES)}", self.at)
        _set_body(self, f"<{self.role}>", (Text, Module, Union, Import))


@dataclass(frozen=True)
class Schema(_Placed):
    """Modules with fixed places, and text that every prompt has.

    Attributes:
        separator: whitespace added after text that does not end in whitespace, where a module
            begins or ends.
    """

    name: str
    body: Sequence[Node | str] = ()
    separator: str = "\n"

    def __post_init__(self) -> None:
        if not self.name:
            raise PmlError("the schema's name is empty: give it one", self.at)
        if self.separator.strip():
            raise PmlError(
                f"separator is {show(self.separator)}, expected whitespace or nothing: put other "
                "text into the modules",
                self.at,
            )
        _set_body(self, "a schema", (Text, Module, Union, Role))
        for role in _roles(self.body):
            _refuse(role.body, (Import,), f"<{role.role}> of a schema")
        _check_scope(self.body, "the schema")

    @cached_property
    def members(self) -> dict[str, Member]:
        """The modules that are in no other module, by name."""
        return _members(self.body)


@dataclass(frozen=True)
class Argument(_Placed):
    """The text for a parameter."""

    name: str
    value: str

    def __post_init__(self) -> None:
        _check_text(f"argument {self.name}", self.value, self.at)


@dataclass(frozen=True)
class Import(_Placed):
    """A module that a prompt takes in, with arguments, imports nested in it, and new text.

    Attributes:
        arguments: a mapping, or `Argument`s; kept as a tuple in the order of names.
        body: texts and imports.
    """

    name: str
    arguments: Mapping[str, str] | Sequence[Argument] = ()
    body: Sequence[Node | str] = ()

    def __post_init__(self) -> None:
        given = self.arguments
        if isinstance(given, Mapping):
            given = [Argument(name, value, at=self.at) for name, value in given.items()]
        ordered = tuple(sorted(given, key=lambda argument: argument.name))
        for one, two in pairwise(ordered):
            if one.name == two.name:
                raise PmlError(f"argument {two.name} is given twice: leave one out", two.at)
        object.__setattr__(self, "arguments", ordered)
        _set_body(self, f"import <{self.name}>", (Text, Import))


@dataclass(frozen=True)
class Prompt(_Placed):
    """Imports from one schema, and new text before, between and after them."""

    schema: str
    body: Sequence[Node | str] = ()

    def __post_init__(self) -> None:
        _set_body(self, "a prompt", (Text, Import, Role))
        for role in _roles(self.body):
            _refuse(role.body, (Module, Union), f"<{role.role}> of a prompt")
            if not role.body:
                raise PmlError(f"<{role.role}> of a prompt is empty: leave it out", role.at)


Node: TypeAlias = Text | Parameter | Module | Union | Role | Import
Member: TypeAlias = tuple[Module, Union | None]
"""A module and the union that contains it, if any."""


def with_roles(
    body: Iterable[Node | str], role: str | None = None
) -> Iterator[tuple[Node, str | None]]:
    """The nodes of one scope in order, those in roles in place of these, each with its role."""
    for node in body:
        if isinstance(node, Role):
            yield from with_roles(node.body, node.role)
        elif not isinstance(node, str):
            yield node, role


def modules_of(body: Iterable[Node | str]) -> Iterator[Member]:
    """The modules of one scope in order, each with the union it is a member of.

    A scope is the direct content of a schema or a module, including that of its roles and unions.
    """
    for node, _ in with_roles(body):
        if isinstance(node, Module):
            yield node, None
        elif isinstance(node, Union):
            yield from ((member, node) for member in node.body if isinstance(member, Module))


def imports_of(body: Iterable[Node | str]) -> Iterator[Import]:
    """The imports of one scope in order, including those in roles."""
    return (node for node, _ in with_roles(body) if isinstance(node, Import))


def _members(body: Iterable[Node | str]) -> dict[str, Member]:
    return {member[0].name: member for member in modules_of(body)}


def _roles(body: Iterable[Node | str]) -> list[Role]:
    return [node for node in body if isinstance(node, Role)]


def _set_body(owner: object, name: str, allowed: tuple[type, ...]) -> None:
    """Make a body canonical: a tuple of nodes, no empty text, no two texts side by side."""
    given = owner.body  # type: ignore[attr-defined]
    merged: list[Node] = []
    for child in (given,) if isinstance(given, str) else given:
        node = Text(child) if isinstance(child, str) else child
        if not any(isinstance(node, kind) for kind in allowed):
            kinds = ", ".join(kind.__name__.lower() for kind in allowed)
            raise PmlError(
                f"{_describe(node)} stands in {name}, expected there: {kinds}",
                getattr(node, "at", None),
            )
        last = merged[-1] if merged else None
        if isinstance(node, Text) and isinstance(last, Text):
            merged[-1] = Text(last.text + node.text, at=last.at)
        elif not (isinstance(node, Text) and not node.text):
            merged.append(node)
    object.__setattr__(owner, "body", tuple(merged))


def _refuse(body: Iterable[Node | str], kinds: tuple[type, ...], owner: str) -> None:
    for node in body:
        if isinstance(node, kinds):
            raise PmlError(
                f"{_describe(node)} does not belong in {owner}", getattr(node, "at", None)
            )


def _describe(node: object) -> str:
    if isinstance(node, Text):
        return f"text {show(node.text.strip())}"
    name = getattr(node, "name", getattr(node, "role", ""))
    return f"{type(node).__name__.lower()} {name}".rstrip()


def _check_text(what: str, value: object, at: Place | None) -> None:
    if not isinstance(value, str):
        raise PmlError(f"{what} is {value!r}, expected text", at)


def _check_name(kind: str, name: str, at: Place | None) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PmlError(
            f"{kind} name is {name!r}, expected a letter or _, then letters, digits, _ . and -", at
        )


def _check_scope(body: Iterable[Node | str], where: str) -> None:
    """Check that modules of one scope have different names, at every level."""
    modules = [module for module, _ in modules_of(body)]
    _check_names(modules, where)
    for module in modules:
        _check_scope(module.body, f"module {module.name}")


def _check_names(nodes: Iterable[Module | Parameter], where: str) -> None:
    first: dict[str, Place | None] = {}
    for node in nodes:
        if node.name in first:
            before = first[node.name]
            line = "" if before is None else f", first on line {before.line}"
            raise PmlError(
                f"{_describe(node)} of {where} is defined twice{line}: rename one", node.at
            )
        first[node.name] = node.at

"""Binds a prompt's imports to a schema: which modules, with which arguments. Needs no tokens."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from onestem.pml.nodes import Import, Member, Module, Node, Prompt, Schema, imports_of, modules_of
from onestem.pml.place import Place, PmlError

Path = tuple[str, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Binding:
    """An import and what it imports.

    Attributes:
        path: names from the outermost module to this one.
        values: given arguments, by parameter; the other parameters have defaults.
    """

    path: Path
    node: Import
    module: Module
    values: Mapping[str, str]


def bind(schema: Schema, prompt: Prompt) -> list[Binding]:
    """The modules that a prompt imports. Their order does not matter: each has its place.

    Raises:
        PmlError: an unknown module or parameter, an import twice, two members of one union, a
            missing argument.
    """
    if prompt.schema != schema.name:
        raise unknown_schema(prompt.schema, [schema.name], prompt.at)
    return list(_bind_scope(schema, (), schema, prompt.body))


def find_schema(prompt: Prompt, schemas: Mapping[str, T]) -> T:
    """The value that `schemas` has for a prompt's schema."""
    if prompt.schema not in schemas:
        raise unknown_schema(prompt.schema, schemas, prompt.at)
    return schemas[prompt.schema]


def _bind_scope(
    schema: Schema, outer: Path, scope: Schema | Module, imports: Sequence[Node | str]
) -> Iterator[Binding]:
    done: list[Member] = []
    for node in imports_of(imports):
        member = scope.members.get(node.name)
        if member is None:
            raise _unknown_module(node, outer, scope.members, schema)
        module, union = member
        for other, others_union in done:
            if other is module:
                raise PmlError(f"module {node.name} is imported twice: leave one out", node.at)
            if union is not None and others_union is union:
                raise PmlError(
                    f"modules {other.name} and {node.name} are members of one union: import one",
                    node.at,
                )
        done.append(member)
        path = (*outer, node.name)
        yield Binding(path, node, module, _arguments(node, module))
        yield from _bind_scope(schema, path, module, node.body)


def _arguments(node: Import, module: Module) -> dict[str, str]:
    known = {parameter.name: parameter for parameter in module.parameters}
    given: dict[str, str] = {}
    for argument in node.arguments:
        assert not isinstance(argument, str)
        if argument.name not in known:
            raise PmlError(
                f"module {node.name} has no parameter {argument.name}"
                f"{_instead(argument.name, known)}",
                argument.at,
            )
        given[argument.name] = argument.value
    for name, parameter in known.items():
        if name not in given and parameter.default is None:
            raise PmlError(
                f"parameter {name} of module {node.name} has no default: write "
                f'<{node.name} {name}="...">',
                node.at,
            )
    return given


def _unknown_module(node: Import, outer: Path, scope: Iterable[str], schema: Schema) -> PmlError:
    where = f"module {'/'.join(outer)}" if outer else f"schema {schema.name}"
    elsewhere = next((path for path in _paths(schema.body) if path[-1] == node.name), None)
    if elsewhere is None:
        hint = _instead(node.name, scope)
    else:
        hint = f": it is {'/'.join(elsewhere)}, import it {_nested(elsewhere)}"
    return PmlError(f"{where} has no module {node.name}{hint}", node.at)


def _nested(path: Path) -> str:
    opened = "".join(f"<{name}>" for name in path[:-1])
    return f"{opened}<{path[-1]}/>" if opened else "outside of other imports"


def _paths(body: Sequence[Node | str], outer: Path = ()) -> Iterator[Path]:
    for module, _ in modules_of(body):
        yield (*outer, module.name)
        yield from _paths(module.body, (*outer, module.name))


def unknown_schema(name: str, known: Iterable[str], at: Place | None = None) -> PmlError:
    """The error of a name that no schema has."""
    return PmlError(f"schema {name!r} is unknown{_instead(name, known)}", at)


def _instead(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest one, or some that are known."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f": did you mean {close[0]}?"
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f", known: {shown or 'none'}"

"""A prompt in reading order: its new texts, each between the imports next to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onestem.pml.layout import Layout
from onestem.pml.nodes import Import, Node, Prompt, Text, with_roles
from onestem.pml.place import PmlError

Path = tuple[str, ...]


@dataclass(frozen=True)
class NewText:
    """Text of a prompt that is not the schema's.

    Attributes:
        inside: the import that contains it; `()`: the prompt itself.
        after, before: the imports that it follows and precedes in the same import, if any.
        last: no import follows it.
        role: of the element around it, if any.
    """

    node: Text
    inside: Path
    after: Path | None
    before: Path | None
    last: bool
    role: str | None

    def beside(self) -> str:
        """Its place, for messages."""
        if self.after is not None:
            return f"after module {'/'.join(self.after)}"
        if self.before is not None:
            return f"before module {'/'.join(self.before)}"
        return f"in module {'/'.join(self.inside)}"


def new_texts(prompt: Prompt, layout: Layout, num_imports: int) -> list[NewText]:
    """The new texts of a prompt whose imports were checked.

    Raises:
        PmlError: a role around an import or a text that has another role in the schema.
    """
    return list(_Reader(layout, num_imports).body(prompt.body, (), None))


class _Reader:
    def __init__(self, layout: Layout, num_imports: int) -> None:
        self.layout = layout
        self.imports_left = num_imports

    def body(self, body: Sequence[Node | str], inside: Path, role: str | None) -> Iterator[NewText]:
        nodes = list(with_roles(body, role))
        after: Path | None = None
        for index, (node, own_role) in enumerate(nodes):
            if isinstance(node, Import):
                after = (*inside, node.name)
                self._check_import(node, after, own_role)
                self.imports_left -= 1
                yield from self.body(node.body, after, own_role)
            elif isinstance(node, Text):
                names = (later.name for later, _ in nodes[index:] if isinstance(later, Import))
                name = next(names, None)
                before = None if name is None else (*inside, name)
                text = NewText(node, inside, after, before, self.imports_left == 0, own_role)
                self._check_text(text)
                yield text

    def _check_import(self, node: Import, path: Path, role: str | None) -> None:
        theirs = self._role_of(path)
        if role is not None and role != theirs:
            raise PmlError(
                f"module {node.name} is imported in <{role}> and stands {_in(theirs)} in the "
                f"schema: import it outside of <{role}>",
                node.at,
            )

    def _check_text(self, text: NewText) -> None:
        """Check that a text among the schema's turns has their role."""
        if text.last or text.role is None:
            return
        path = text.after or text.inside or text.before
        assert path is not None
        theirs = self._role_of(path)
        if text.role != theirs:
            raise PmlError(
                f"text in <{text.role}> stands {text.beside()}, which is {_in(theirs)} in the "
                "schema: put it after the last import",
                text.node.at,
            )

    def _role_of(self, path: Path) -> str | None:
        turn = self.layout.blocks[path].turn
        return None if turn is None else self.layout.roles[turn]


def _in(role: str | None) -> str:
    return "outside of roles" if role is None else f"in <{role}>"

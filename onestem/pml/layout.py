"""Lays out a schema: text to token ids, modules to positions.

Text and modules take consecutive positions. Members of a union start at the same position and the
longest counts; a parameter takes `length` positions (Prompt Cache, section 3.3). Nothing here
depends on a prompt, so a schema is laid out once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from onestem.pml.nodes import Module, Node, Parameter, Role, Schema, Text, Union, modules_of
from onestem.pml.place import Place, PmlError, show
from onestem.pml.tokens import Part, Tokenizer, around_turns, encode_parts, encode_text


@dataclass(frozen=True, eq=False)
class Span:
    """Text of one block at consecutive positions.

    Attributes:
        index: number among the layout's spans and slots, in the order of the schema.
        token_ids: int32 `[n]`, n > 0.
        position: of its first token.
        text: its text, for display.
        ends_in_space: whether more text may follow without a separator.
    """

    index: int
    block: Block
    token_ids: np.ndarray
    position: int
    text: str
    ends_in_space: bool

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.position + len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter's place; `default_ids` (int32 `[n]`) is None where an argument must be given."""

    index: int
    block: Block
    parameter: Parameter
    position: int
    default_ids: np.ndarray | None

    @property
    def end(self) -> int:
        """The position after those that it keeps free."""
        return self.position + self.parameter.length


@dataclass(eq=False)
class Block:
    """A module, or the schema's own text (`module` is None, `path` is empty).

    Attributes:
        path: names from the outermost module to this one.
        union: that it is a member of, if any.
        turn: index of the schema's turn that contains it; None: the schema has no roles.
        items: its own text and parameters by position, without nested modules.
        start, end: its positions, with nested modules.
    """

    path: tuple[str, ...]
    module: Module | None
    parent: Block | None
    union: Union | None = None
    turn: int | None = None
    items: list[Span | Slot] = field(default_factory=list)
    children: list[Block] = field(default_factory=list)
    start: int = 0
    end: int = 0

    @property
    def cached(self) -> bool:
        """Whether its own text is computed once for all prompts."""
        return self.module is None or self.module.cache

    @property
    def spans(self) -> list[Span]:
        """Its own text, by position."""
        return [item for item in self.items if isinstance(item, Span)]

    @property
    def slots(self) -> list[Slot]:
        """The places of its parameters, by position."""
        return [item for item in self.items if isinstance(item, Slot)]

    def enclosing(self) -> list[Block]:
        """The schema's own text, the modules around this one from outside in, and this one."""
        blocks: list[Block] = []
        block: Block | None = self
        while block is not None:
            blocks.append(block)
            block = block.parent
        return blocks[::-1]

    def __str__(self) -> str:
        return f"module {'/'.join(self.path)}" if self.path else "the schema's text"


@dataclass(frozen=True, eq=False)
class Layout:
    """A schema with token ids and positions.

    Attributes:
        blocks: by path; `()` is the schema's own text.
        roles: of the schema's turns; empty: its text is raw.
        around: the chat template's text before each of these turns.
        end: last position + 1.
        max_positions: positions that the model has; None: not checked.
    """

    schema: Schema
    tokenizer: Tokenizer
    blocks: dict[tuple[str, ...], Block]
    roles: tuple[str, ...]
    around: tuple[str, ...]
    end: int
    max_positions: int | None

    @property
    def root(self) -> Block:
        """The schema's own text."""
        return self.blocks[()]

    def items(self) -> Iterator[Span | Slot]:
        """All spans and slots in the order of the schema."""
        every = [item for block in self.blocks.values() for item in block.items]
        return iter(sorted(every, key=lambda item: item.index))


def lay_out(schema: Schema, tokenizer: Tokenizer, *, max_positions: int | None = None) -> Layout:
    """Give a schema's tokens their positions.

    Raises:
        PmlError: a default is longer than its parameter, the model has too few positions, or its
            chat template refuses the schema's roles.
    """
    return _Walk(schema, tokenizer, max_positions).layout()


def before_turns(tokenizer: Tokenizer, roles: Sequence[str], at: Place | None) -> list[str]:
    """The chat template's text before each of a schema's turns.

    Templates may look ahead, so the turns are rendered with a user's turn after them. Such a turn
    follows sooner or later.
    """
    follows = [] if roles[-1] == "user" else ["user"]
    return around_turns(tokenizer, [*roles, *follows], answer=True, at=at)[: len(roles)]


def separated(text: str, separator: str) -> str:
    """A text followed by the separator, unless it ends in whitespace or is empty."""
    return text if not text or text[-1].isspace() else text + separator


@dataclass
class _Turn:
    """Neighbouring elements of one role."""

    role: str
    bodies: list[Sequence[Node | str]]
    at: Place | None


def _turns_of(body: Sequence[Node | str]) -> list[_Turn]:
    """The turns of a body, where text outside of roles is the user's; none if it has no roles."""
    turns: list[_Turn] = []
    if not any(isinstance(node, Role) for node in body):
        return turns
    # Each role is by itself, also where one object is there twice.
    places = (index if isinstance(node, Role) else None for index, node in enumerate(body))
    for _, group in groupby(zip(places, body, strict=True), lambda one: one[0]):
        nodes = [node for _, node in group]
        role, inner = "user", nodes
        if isinstance(nodes[0], Role):
            role, inner = nodes[0].role, list(nodes[0].body)
        if turns and turns[-1].role == role:
            turns[-1].bodies.append(inner)
        else:
            turns.append(_Turn(role, [inner], getattr(nodes[0], "at", None)))
    return turns


class _Walk:
    """Goes through a schema once; `position` is where the next token will be."""

    def __init__(self, schema: Schema, tokenizer: Tokenizer, max_positions: int | None) -> None:
        self.schema = schema
        self.tokenizer = tokenizer
        self.max_positions = max_positions
        self.position = 0
        self.block = Block((), None, None)
        self.blocks: dict[tuple[str, ...], Block] = {(): self.block}
        self._turn: int | None = None
        self._parts: list[Part] = []  # text since the last span or slot
        self._at: Place | None = schema.at  # of that text
        self._last = ""  # last character of the current stretch, "\0" for a parameter
        self._count = 0
        self._begun = False

    def layout(self) -> Layout:
        turns = _turns_of(self.schema.body)
        roles = [turn.role for turn in turns]
        around: list[str] = []
        if turns:
            around = before_turns(self.tokenizer, roles, turns[0].at)
            self._turns(turns, around)
        else:
            self._body(self.schema.body)
        self._flush()
        self.block.end = self.position
        return Layout(
            self.schema,
            self.tokenizer,
            self.blocks,
            tuple(roles),
            tuple(around),
            self.position,
            self.max_positions,
        )

    def _turns(self, turns: list[_Turn], around: list[str]) -> None:
        for index, (turn, before) in enumerate(zip(turns, around, strict=True)):
            self._turn = index
            self._at = turn.at
            self._parts.append(Part(before, control=True))
            self._last = ""
            for number, body in enumerate(turn.bodies):
                if number:
                    self._separate()
                self._body(body)

    def _body(self, body: Sequence[Node | str]) -> None:
        for node in body:
            if isinstance(node, Text):
                self._at = self._at if self._parts else node.at
                self._parts.append(Part(node.text))
                self._last = node.text[-1]
            elif isinstance(node, Parameter):
                self._flush()
                self._slot(node)
            elif isinstance(node, (Module, Union)):
                self._separate()
                self._flush()
                self._modules(node)

    def _modules(self, node: Module | Union) -> None:
        start, ends = self.position, []
        for module, union in modules_of([node]):
            self.position = start
            self._module(module, union)
            ends.append(self.position)
        self.position = max(ends)

    def _module(self, module: Module, union: Union | None) -> None:
        outer = self.block
        inner = Block((*outer.path, module.name), module, outer, union, self._turn)
        inner.start = self.position
        outer.children.append(inner)
        self.block = self.blocks[inner.path] = inner
        self._body(module.body)
        self._separate()
        self._flush()
        inner.end = self.position
        self.block = outer

    def _separate(self) -> None:
        """End a stretch of text, with a separator if it needs one: more text may follow."""
        if self._last and not self._last.isspace() and self.schema.separator:
            self._parts.append(Part(self.schema.separator))
        self._last = ""

    def _flush(self) -> None:
        """Make a span of the text since the last one. The first begins with BOS."""
        if not self._parts and self._begun:
            return
        ids = encode_parts(self.tokenizer, self._parts, first=not self._begun)
        text = "".join(part.text for part in self._parts)
        self._begun, self._parts = True, []
        if not len(ids):
            return
        spaced = not self._last or self._last.isspace()
        span = Span(self._count, self.block, ids, self.position, text, spaced)
        self._add(span, self._at)

    def _slot(self, parameter: Parameter) -> None:
        ids = None
        if parameter.default is not None:
            ids = encode_text(self.tokenizer, parameter.default)
            if len(ids) > parameter.length:
                raise PmlError(
                    f"default {show(parameter.default)} of parameter {parameter.name} has "
                    f"{len(ids)} tokens, its length is {parameter.length}: raise the length",
                    parameter.at,
                )
        slot = Slot(self._count, self.block, parameter, self.position, ids)
        self._add(slot, parameter.at)
        self._last = "\0"

    def _add(self, item: Span | Slot, at: Place | None) -> None:
        self.block.items.append(item)
        self._count += 1
        self.position = item.end
        if self.max_positions is not None and self.position > self.max_positions:
            raise PmlError(
                f"{self.block} reaches position {self.position - 1} and the model has "
                f"{self.max_positions} positions: shorten the schema, or put alternatives into a "
                "union",
                at,
            )

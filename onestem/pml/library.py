"""A collection of schemas, laid out for one tokenizer, and prompts compiled against them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from onestem.pml.binding import find_schema, unknown_schema
from onestem.pml.compile import compile_prompt
from onestem.pml.layout import Block, Layout, lay_out
from onestem.pml.nodes import Prompt, Schema, modules_of
from onestem.pml.parser import parse_prompt, parse_schema, read_prompt, read_schema
from onestem.pml.place import PmlError
from onestem.pml.segments import (
    CompiledPrompt,
    EncodedSegment,
    Encoding,
    Isolation,
    parse_isolation,
)
from onestem.pml.tokens import Tokenizer

__all__ = ["Library"]

# Markup, or the file that it is in.
Source = str | os.PathLike[str]


class Library:
    """Schemas by name.

    Args:
        max_positions: positions that the model has; None: not checked.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_positions: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_positions = max_positions
        self.layouts: dict[str, Layout] = {}
        self._encodings: dict[tuple[str, Isolation], Encoding] = {}

    def add(self, source: Schema | Source) -> Layout:
        """Lay a schema out. The same one may be added again.

        Args:
            source: nodes, markup (text that begins with `<`), or a file.

        Raises:
            PmlError: the schema is wrong, or another schema has its name.
        """
        schema = source if isinstance(source, Schema) else _schema(source)
        known = self.layouts.get(schema.name)
        if known is None:
            layout = lay_out(schema, self.tokenizer, max_positions=self.max_positions)
            self.layouts[schema.name] = layout
            return layout
        if known.schema != schema:
            raise PmlError(
                f"another schema is named {schema.name!r}: rename one of them", schema.at
            )
        return known

    def compile(self, source: Prompt | Source, isolation: str = "anchored") -> CompiledPrompt:
        """A prompt's segments.

        Raises:
            PmlError: the prompt is wrong, or its schema is not here.
        """
        prompt = source if isinstance(source, Prompt) else _prompt(source)
        layout = find_schema(prompt, self.layouts)
        encoding = self.encoding(prompt.schema, isolation)
        return compile_prompt(layout, prompt, encoding.isolation, encoding=encoding)

    def encoding(self, name: str, isolation: str) -> Encoding:
        """The part of a schema that is computed once.

        Raises:
            PmlError: there is no such schema.
        """
        key = (name, parse_isolation(isolation))
        if key not in self._encodings:
            if name not in self.layouts:
                raise unknown_schema(name, self.layouts)
            self._encodings[key] = Encoding(self.layouts[name], key[1])
        return self._encodings[key]

    def alternatives(self, compiled: CompiledPrompt) -> list[EncodedSegment]:
        """Cached text of the other members of unions from which a prompt imports: the next prompt
        may use it."""
        layout = self.layouts[compiled.schema]
        segments = self.encoding(compiled.schema, compiled.isolation).segments
        keys = {segment.key for segment in compiled.segments if segment.kind == "cached"}
        found = []
        for block in layout.blocks.values():
            for members in _unions_of(layout, block):
                own = [segments[i.index] for m in members for i in m.items if i.index in segments]
                if any(segment.key in keys for segment in own):
                    found += [s for s in own if s.kind == "cached" and s.key not in keys]
        return found


def _unions_of(layout: Layout, block: Block) -> Iterator[list[Block]]:
    """The members of each union that is directly in a block."""
    body = layout.schema.body if block.module is None else block.module.body
    members: dict[int, list[Block]] = {}
    blocks = {child.path[-1]: child for child in block.children}
    for module, union in modules_of(body):
        if union is not None:
            members.setdefault(id(union), []).append(blocks[module.name])
    yield from members.values()


def _schema(source: Source) -> Schema:
    markup = _markup(source)
    return read_schema(Path(source)) if markup is None else parse_schema(markup)


def _prompt(source: Source) -> Prompt:
    markup = _markup(source)
    return read_prompt(Path(source)) if markup is None else parse_prompt(markup)


def _markup(source: Source) -> str | None:
    begins = isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("<")
    return source if isinstance(source, str) and begins else None

"""A collection of schemas, laid out for one tokenizer, and prompts compiled against them."""

from __future__ import annotations

import os
from pathlib import Path

from onestem.pml.binding import find_schema, unknown_schema
from onestem.pml.compile import compile_prompt
from onestem.pml.layout import Layout, lay_out
from onestem.pml.nodes import Prompt, Schema
from onestem.pml.parser import D, of_kind, parse, read
from onestem.pml.place import PmlError
from onestem.pml.segments import (
    CompiledPrompt,
    Encoding,
    Isolation,
    Segment,
    parse_isolation,
)
from onestem.pml.tokens import Tokenizer

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
        schema = _document(Schema, source)
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
        prompt = _document(Prompt, source)
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

    def alternatives(self, compiled: CompiledPrompt) -> list[Segment]:
        """Cached text of the other members of unions from which a prompt imports: the next prompt
        may use it."""
        segments = self.encoding(compiled.schema, compiled.isolation).segments
        keys = {segment.key for segment in compiled.segments if segment.kind == "cached"}
        unions: dict[tuple[object, int], list[Segment]] = {}
        for block in self.layouts[compiled.schema].blocks.values():
            if block.union is not None:
                own = [segments[item.index] for item in block.items if item.index in segments]
                unions.setdefault((block.parent, id(block.union)), []).extend(own)
        return [
            segment
            for members in unions.values()
            if any(segment.key in keys for segment in members)
            for segment in members
            if segment.kind == "cached" and segment.key not in keys
        ]


def _document(kind: type[D], source: Schema | Prompt | Source) -> D:
    if isinstance(source, (Schema, Prompt)):
        return of_kind(kind, source)
    begins = isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("<")
    return of_kind(kind, parse(str(source)) if begins else read(Path(source)))

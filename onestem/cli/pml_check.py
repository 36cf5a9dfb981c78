"""What `onestem pml check` does with its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from onestem.cli.pml_model import load_tokenizer
from onestem.pml import (
    Layout,
    PmlError,
    Prompt,
    Schema,
    bind,
    compile_prompt,
    find_schema,
    lay_out,
    read,
)
from onestem.pml.nodes import Node, modules_of


class Checker:
    """Reads files, reports each one's first error, and keeps what is needed for prompts."""

    def __init__(self, model: str | None) -> None:
        self.tokenizer = None if model is None else load_tokenizer(model)
        self.schemas: dict[str, Schema] = {}
        self.layouts: dict[str, Layout] = {}
        self.prompts: list[tuple[Path, Prompt]] = []
        self.failed = False

    def add(self, path: Path) -> None:
        """Read a file: a schema is checked and kept, a prompt is kept."""
        try:
            found = read(path)
            if isinstance(found, Prompt):
                self.prompts.append((path, found))
            else:
                self._add_schema(path, found)
        except PmlError as error:
            self._fail(error)

    def _add_schema(self, path: Path, schema: Schema) -> None:
        known = self.schemas.setdefault(schema.name, schema)
        if known is not schema:
            first = known.at.file if known.at is not None else ""
            raise PmlError(
                f"schema {schema.name!r} is defined twice, first in {first}: rename one", schema.at
            )
        counts = f"{_count(schema.body)} modules"
        if self.tokenizer is not None:
            tokenizer, max_positions = self.tokenizer
            layout = lay_out(schema, tokenizer, max_positions=max_positions)
            self.layouts[schema.name] = layout
            counts += f", {layout.end} positions"
        typer.echo(f"{path}: schema {schema.name}, {counts}")

    def check_prompt(self, path: Path, prompt: Prompt) -> None:
        """Check a prompt against the schema that was added."""
        try:
            imports = len(bind(find_schema(prompt, self.schemas), prompt))
            facts = f"{imports} imports"
            if prompt.schema in self.layouts:
                compiled = compile_prompt(self.layouts[prompt.schema], prompt)
                facts += (
                    f", {compiled.num_cached_tokens} tokens to be cached and "
                    f"{compiled.num_computed_tokens} to be computed"
                )
            typer.echo(f"{path}: prompt of {prompt.schema}, {facts}")
        except PmlError as error:
            self._fail(error)

    def _fail(self, error: PmlError) -> None:
        typer.echo(str(error), err=True)
        self.failed = True


def _count(body: Sequence[Node | str]) -> int:
    """Modules, at every level."""
    return sum(1 + _count(module.body) for module, _ in modules_of(body))

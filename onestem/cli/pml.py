"""`onestem pml`: check schemas and prompts, show where their tokens stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from onestem.cli import options

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Prompts of modules: check and show PML files."
)


@app.command("check")
def check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Schemas, and prompts for them.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Check lengths, gaps and positions too, with this model's tokenizer."),
    ] = None,
) -> None:
    """Check schemas and prompts; each error is one line: FILE:LINE:COLUMN: what is wrong.

    A prompt is checked against its schema, which is one of the files. Exit code: 0 if all is
    right, 2 if not.
    """
    from onestem.cli.pml_check import Checker

    checker = Checker(model)
    for path in files:
        checker.add(path)
    for path, prompt in checker.prompts:
        checker.check_prompt(path, prompt)
    if checker.failed:
        raise typer.Exit(2)


@app.command("show")
def show(
    schema_file: Annotated[Path, typer.Argument(metavar="SCHEMA", help="File of a schema.")],
    prompt_file: Annotated[
        Path | None, typer.Argument(metavar="PROMPT", help="File of a prompt.")
    ] = None,
    model: options.Model = "embedded",
    isolation: Annotated[
        str, typer.Option(help="Who sees what: anchored, isolated or off.")
    ] = "anchored",
    ids: Annotated[bool, typer.Option("--ids", help="Print token ids too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show a schema's modules with their positions, and a prompt's segments.

    No weights are loaded. With PROMPT, each segment is shown with what it attends to (numbers of
    other segments) and the key under which it is cached.
    """
    from onestem.cli.pml_model import load_tokenizer
    from onestem.cli.pml_show import layout_facts, layout_lines, prompt_facts, prompt_lines
    from onestem.pml import compile_prompt, lay_out, parse_isolation, read_prompt, read_schema

    who_sees_what = parse_isolation(isolation)
    tokenizer, max_positions = load_tokenizer(model)
    layout = lay_out(read_schema(schema_file), tokenizer, max_positions=max_positions)
    shown: dict[str, Any] = {"schema": layout_facts(layout)}
    lines = list(layout_lines(layout, ids))
    if prompt_file is not None:
        compiled = compile_prompt(layout, read_prompt(prompt_file), who_sees_what)
        shown["prompt"] = prompt_facts(compiled)
        lines += ["", *prompt_lines(compiled, tokenizer, ids)]
    typer.echo(json.dumps(shown) if as_json else "\n".join(lines))

"""`onestem check-bits`: whether answers change in any bit with what should not matter."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onestem.cli import options
from onestem.errors import ConfigError
from onestem.files import check_place
from onestem.options import EngineOptions

if TYPE_CHECKING:
    from onestem.evals.bits.pairs import Kind


@options.with_options
def check_bits(
    context: typer.Context,
    engine: EngineOptions,
    name: options.Model = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask a server of OpenAI's completions: http://localhost:8000/v1. MODEL is its "
            "name there.",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(help="Prompts; four share a beginning.", min=4)] = 12,
    tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=8)] = 256,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 24,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Show whether answers change in any bit with what should not matter.

    Requests asked alone and cold are asked again: with cached prefixes, beside others, in another
    order, preempted, with other steps, pages and sharing; of a server: again, and together. Half
    are greedy, half sampled with a seed. Tokens and log-probabilities are compared (here whole rows
    of logits), and the first operation that differs is named. Exit code 1: something differs, or
    nothing was cached.
    """
    from onestem.evals.bits.pairs import table

    if as_json is not None:
        check_place(as_json, "another file for --json")
    engine = options.named_model(context, engine, name)
    sizes = {"prompts": prompts, "tokens": tokens, "sampled": max_tokens}
    explain: Callable[[Kind], dict[str, Any] | None] | None = None
    if url is None:
        from onestem.evals.bits.engine import EngineBits

        ours = EngineBits(engine, **sizes)
        explain = ours.explain if engine.tensor_parallel_size == 1 else None
        tried, asked = ours.kinds(), str(engine.model)
    else:
        from onestem.evals.bits.server import ServerBits

        for field, flag in EngineOptions.offered().items():
            if field != "model" and context.params[field] not in (None, []):
                raise ConfigError(
                    f"--{flag} is of this engine, and --url asks another: leave it out"
                )
        theirs = ServerBits(url, name or context.params["model"], **sizes)
        tried, asked = theirs.kinds(), theirs.model
    kinds = []
    for kind in tried:
        kinds.append(kind)
        print(f"{kind.name}: {kind.told}", file=sys.stderr)
    typer.echo(table(kinds))
    changed = next((kind for kind in kinds if kind.first is not None), None)
    where = None
    if changed is not None and explain is not None:
        where = explain(changed)
        told = "nowhere, when it is tried again step by step"
        if where is not None:
            told = "{operation}, at token {position} of request {request}".format(**where)
        typer.echo(f"{changed.name} first differs in: {told}")
    failed = [kind for kind in kinds if kind.problem]
    if as_json is not None:
        found = {"model": asked, "url": url, **sizes, "kinds": list(map(asdict, kinds)),
                 "first_change": where, "passes": not failed}  # fmt: skip
        as_json.write_text(json.dumps(found, indent=1) + "\n")
    if failed:
        raise typer.Exit(1)

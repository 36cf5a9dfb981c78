"""`onestem bench batch`: a synthetic job, of given or drawn lengths, in one mode of sharing."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from onestem.cli import options
from onestem.cli.bench import AsJson, InputOrder, Seed, WarmUp
from onestem.files import check_apart
from onestem.options import EngineOptions
from onestem_lab.lengths import length_files, parse_lengths

__all__ = ["batch"]


@options.with_options
def batch(
    engine: EngineOptions,
    groups: Annotated[int, typer.Option(help="Prefixes.")] = 4,
    degree: Annotated[
        str, typer.Option(help="Requests per prefix; '64,2': 64 sub-prefixes of 2 each.")
    ] = "16",
    prefix: Annotated[
        str,
        typer.Option(metavar="LENGTHS", help="Tokens of each prefix; '400,101' makes two levels."),
    ] = "1000",
    distinct: Annotated[
        str, typer.Option(metavar="LENGTHS", help="Tokens of each request's own part.")
    ] = "50",
    output: Annotated[
        str, typer.Option(metavar="LENGTHS", help="Tokens to sample for each request.")
    ] = "50",
    input_order: InputOrder = "shuffled",
    seed: Seed = 0,
    warm_up: WarmUp = True,
    as_json: AsJson = False,
) -> None:
    """Time a job of prompts that share text, greedy, with random token ids."""
    from onestem.bench import BatchCase, run_batch

    case = BatchCase.parse(
        groups=groups,
        degree=degree,
        prefix=prefix,
        distinct=distinct,
        output=output,
        input_order=input_order,
        seed=seed,
        lengths=parse_lengths,
    )
    prefixes = [("prefix", part) for part in prefix.split(",")]
    read = length_files([*prefixes, ("distinct", distinct), ("output", output)])
    check_apart("trace", engine.trace, read)
    llm = options.load_llm(engine)
    result = run_batch(llm, case, warm_up=warm_up)
    if as_json:
        typer.echo(json.dumps({"model": str(engine.model), **result}))
        return
    print(f"{engine.model}, {llm.dtype}, {llm.device}", file=sys.stderr)
    for name, value in result.items():
        typer.echo(f"{name:26} {value}")

"""`onestem bench`: a job with sharing and without, on this machine; and onestem-lab's verbs."""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_group

from onestem.cli import options
from onestem.cli.hints import HintingGroup
from onestem.errors import ConfigError
from onestem.options import EMBEDDED, EngineOptions
from onestem.shapes import is_shape

LAB = ("attention", "batch", "paper", "pml", "serve", "tune")
"""Verbs that the distribution onestem-lab adds (`lab/`)."""

PLAIN = "job"

# Options of each verb that times a job.
InputOrder = Annotated[
    str, typer.Option(help="Order of the input: shuffled, sorted or round-robin.")
]
Seed = Annotated[int, typer.Option(help="Seed of prompts, order and sampling.")]
WarmUp = Annotated[
    bool, typer.Option("--warm-up/--no-warm-up", help="Run a small job first, outside the clock.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON line instead of a table.")]


@cache
def _added() -> dict[str, Any]:
    """Verbs of installed packages: an entry point of `onestem.bench` is a Typer app of commands."""
    found: dict[str, Any] = {}
    for entry in entry_points(group="onestem.bench"):
        found |= get_group(entry.load()).commands
    return found


def _may_be_model(name: str) -> bool:
    from onestem.models.local import local_models

    if name == EMBEDDED or is_shape(name) or "/" in name or Path(name).exists():
        return True
    return any(model.name == name.lower() for model in local_models())


class BenchGroup(HintingGroup):
    """`onestem bench MODEL` is `onestem bench job MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        verbs = [*self.list_commands(ctx), *LAB]
        if args and args[0] not in ("-h", "--help", *verbs):
            if not (args[0].startswith("-") or _may_be_model(args[0])):
                raise ConfigError(
                    f"{args[0]!r} is no verb of onestem bench and no model: give one of "
                    f"{', '.join(dict.fromkeys(verbs))}, or a model's directory, owner/name, "
                    f"shape:NAME or {EMBEDDED}"
                )
            args = [PLAIN, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_added()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or _added().get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in LAB and self.get_command(ctx, args[0]) is None:
            raise ConfigError(
                f"onestem bench {args[0]} is of onestem-lab, which is not installed: "
                "pip install ./lab in a clone"
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=BenchGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Measure on this machine. `onestem bench MODEL` is `onestem bench job MODEL`. The other "
    "verbs are of onestem-lab (`pip install ./lab` in a clone). docs/models.md has the shapes, for "
    "shape:NAME in place of a model.",
)


@app.callback()
def _group() -> None:
    pass


@app.command(PLAIN)
@options.with_options
def job(
    context: typer.Context,
    engine: EngineOptions,
    name: options.Model = None,
    groups: Annotated[int, typer.Option(help="Prefixes.")] = 4,
    degree: Annotated[
        str, typer.Option(help="Requests per prefix; '64,2': 64 sub-prefixes of 2 each.")
    ] = "16",
    prefix: Annotated[
        str, typer.Option(help="Tokens of each prefix; '400,101' makes two levels.")
    ] = "1000",
    distinct: Annotated[str, typer.Option(help="Tokens of each request's own part.")] = "50",
    output: Annotated[str, typer.Option(help="Tokens to sample for each request.")] = "50",
    input_order: InputOrder = "shuffled",
    seed: Seed = 0,
    warm_up: WarmUp = True,
    as_json: AsJson = False,
) -> None:
    """Time a job of prompts that share text, with sharing and without.

    Prompts are random token ids, answers greedy. --share names the mode that `off` is compared
    with; with --share off that runs alone. --trace has the steps of the named mode.
    """
    from onestem.bench import BatchCase, compare

    case = BatchCase.parse(
        groups=groups,
        degree=degree,
        prefix=prefix,
        distinct=distinct,
        output=output,
        input_order=input_order,
        seed=seed,
    )
    engine = options.named_model(context, engine, name)
    found = compare(engine, case, warm_up=warm_up)
    if as_json:
        typer.echo(json.dumps({"model": str(engine.model), **found}))
        return
    for share, result in found.items():
        print(f"{engine.model}, {share}, {result['dtype']}, {result['device']}", file=sys.stderr)
        for key in ("requests", "seconds", "requests_per_s", "output_tokens_per_s",
                    "logical_prompt_tokens", "processed_prompt_tokens"):  # fmt: skip
            typer.echo(f"{share:12} {key:26} {result[key]}")
    if len(found) > 1:
        first, off = found.values()
        times = first["requests_per_s"] / off["requests_per_s"]
        typer.echo(f"{engine.share} gives {times:.2f} times the requests per second of off")

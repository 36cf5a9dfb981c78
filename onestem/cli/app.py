"""The `onestem` command and how its errors end."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from onestem import __version__
from onestem.cli import batch, bench, env, generate, plan, pml, serve, tune
from onestem.errors import OnestemError

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LLM inference for prompts that share text.",
)
app.command("batch")(batch.batch)
app.command("generate")(generate.generate)
app.command("plan")(plan.plan)
app.command("serve")(serve.serve)
app.command("env")(env.env)
app.command("tune")(tune.tune)
app.add_typer(pml.app, name="pml")
app.add_typer(bench.app, name="bench")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"onestem {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command; a caller's mistake is one line on stderr and exit code 2."""
    try:
        app()
    except OnestemError as error:
        print(f"onestem: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)

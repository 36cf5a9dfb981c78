"""The `onestem` command and how its errors end."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Annotated

import typer

import onestem
from onestem.cli import (
    batch,
    bench,
    chat,
    check_bits,
    env,
    evaluate,
    generate,
    models,
    plan,
    pml,
    serve,
)
from onestem.cli.hints import HintingCommand, HintingGroup
from onestem.errors import OnestemError

INTERRUPTED = 130

app = typer.Typer(
    cls=HintingGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LLM inference for prompts that share text.",
)
app.command("batch")(batch.batch)
app.command("score")(batch.score)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("plan")(plan.plan)
app.command("serve")(serve.serve)
app.command("models")(models.models)
app.command("eval")(evaluate.evaluate)
app.command("check-bits")(check_bits.check_bits)
app.command("env")(env.env)
app.add_typer(pml.app, name="pml")
app.add_typer(bench.app, name="bench")
for group in (app, pml.app, bench.app):
    for command in group.registered_commands:
        command.cls = HintingCommand


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"onestem {onestem.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command; a caller's mistake is one line on stderr and exit code 2. Ctrl-C is exit
    code 130, and pressed again it ends the process at once. What is printed is UTF-8."""
    if hasattr(sys.stdout, "reconfigure"):  # None, where it is closed, has not
        sys.stdout.reconfigure(encoding="utf-8")  # a locale's may have no place for an answer
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        _run()
    except SystemExit as ended:
        # The interpreter's end may take seconds, and an interrupt there would print a traceback.
        signal.signal(signal.SIGINT, _end_at_once if ended.code == INTERRUPTED else before)
        raise


def _run() -> None:
    try:
        app()
    except OnestemError as error:
        print(f"onestem: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        print(f"onestem: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGINT, _end_at_once)
    raise KeyboardInterrupt


def _end_at_once(*_: object) -> None:
    os.write(2, b"onestem: ended at once\n")
    os._exit(INTERRUPTED)

"""Verbs of `onestem bench` that the laboratory adds."""

from __future__ import annotations

import typer

from onestem.cli.hints import HintingCommand
from onestem_lab.cli import attention, batch, paper, pml, serve, tune
from onestem_lab.lengths import FORMS

__all__ = ["app"]

LENGTHS = f"LENGTHS: {FORMS} (lab/notes/benchmarks.md). The seed draws them."

app = typer.Typer()
app.command("attention", cls=HintingCommand)(attention.attention)
app.command("batch", cls=HintingCommand, epilog=LENGTHS)(batch.batch)
app.command("paper", cls=HintingCommand)(paper.paper)
app.command("pml", cls=HintingCommand)(pml.pml)
app.command("serve", cls=HintingCommand, epilog=LENGTHS)(serve.serve)
app.command("tune", cls=HintingCommand)(tune.tune)

"""`onestem models`: which families there are, and what a model would need here."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from onestem.cli import options
from onestem.options import EngineOptions

if TYPE_CHECKING:
    from onestem.needs import Needs

__all__ = ["models"]

NEEDED_BY = ("model", "device", "dtype", "kv_memory", "max_model_len", "page_size", "threads")


@options.with_options
def models(
    engine: Annotated[EngineOptions, options.Only(*NEEDED_BY)],
    model: Annotated[
        str | None, typer.Argument(metavar="DIR", help="Model directory, shape:NAME, or hub name.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    """List the families of models that are supported, or with a directory: what the model would
    need on this machine, and whether its files are complete. No weights are loaded.

    Exit code: 0 if it would run, 1 if files are missing or memory is too small, 2 if it is not
    supported.
    """
    if model is None:
        _list(as_json)
        return
    from onestem.needs import needs_of

    needs = needs_of(engine)
    if as_json:
        typer.echo(json.dumps(asdict(needs)))
    else:
        _show(needs)
    raise typer.Exit(1 if needs.problem else 0)


def _list(as_json: bool) -> None:
    from onestem.models.families import FAMILIES

    known = {name: family.models for name, family in FAMILIES.items()}
    if as_json:
        typer.echo(json.dumps(known))
        return
    width = max(map(len, known))
    for name, called in known.items():
        typer.echo(f"{name:{width}}  {called}")


def _show(needs: Needs) -> None:
    gib, kib = 2**30, 2**10
    windows = "".join(
        f", {count} of them with a window of {size}" for size, count in needs.windows.items()
    )
    for name, value in {
        "architecture": f"{needs.architecture} ({needs.models})",
        "directory": needs.path,
        "parameters": f"{needs.parameters / 1e9:.3g} billion",
        "layers": f"{needs.num_layers}{windows}",
        "vocabulary": needs.vocab_size,
        "positions": needs.max_positions,
        "runs on": f"{needs.device}, in {needs.dtype}",
        "weights": f"{needs.weight_bytes / gib:.2f} GiB",
        "KV memory of a token": f"{needs.kv_bytes_per_token / kib:g} KiB",
        "tokens in KV memory": needs.kv_tokens,
        "longest sequence": needs.max_model_len,
        "problem": needs.problem or "none",
    }.items():
        typer.echo(f"{name}: {value}")

"""`onestem models`: the supported families, and what a model would need here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onestem.cli import options
from onestem.options import EngineOptions

if TYPE_CHECKING:
    from onestem.models.format_errors import FormatError
    from onestem.models.local import LocalModel
    from onestem.needs import Needs

NEEDED_BY = (
    "model",
    "device",
    "dtype",
    "quantization",
    "kv_memory",
    "max_model_len",
    "page_size",
    "threads",
)


@options.with_options
def models(
    engine: Annotated[EngineOptions, options.Only(*NEEDED_BY)],
    model: Annotated[
        str | None,
        typer.Argument(metavar="DIR", help="Directory, GGUF file, shape:NAME, or hub name."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Load it; show its format's errors, and its perplexity.")
    ] = False,
    original: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The weights that were quantised, to check against."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of the perplexity (default: Python's help topics)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    """List the supported families of models, and the models that are on this machine: in installed
    packages, the hub's cache, Ollama's store, and GGUF files. With a model: show what it would need
    on this machine, and whether its files are complete. No weights are loaded.

    With --check the relative errors of products of quantised weights with random rows are shown
    (with --quantization or --original, errors of weights too), and the perplexity of a text, beside
    that of the float32 form.

    Exit code: 0 if it would run, 1 if files are missing or memory is too small, 2 if it is not
    supported.
    """
    if model is None:
        _list(as_json)
        return
    from onestem.cli.models_check import perplexity
    from onestem.needs import needs_of

    needs = needs_of(engine)
    checks = check or original is not None or text is not None
    errors: Iterable[FormatError] = ()
    loads = checks and needs.problem is None
    if loads:
        errors = _errors(engine, needs, original)
    if as_json:
        told: dict[str, Any] = {"errors": [asdict(one) for one in errors]} if checks else {}
        if loads:
            found = perplexity(engine, needs, original, text)
            told["perplexity"] = found and asdict(found)
        typer.echo(json.dumps(asdict(needs) | told))
    else:
        _show(needs)
        num = 0
        for num, one in enumerate(errors, 1):  # noqa: B007
            typer.echo(_error_line(one))
        if loads and not num:
            typer.echo(
                "check: nothing is quantised, so there are no errors of a format; the files are "
                "complete"
            )
        if loads:
            found = perplexity(engine, needs, original, text)
            typer.echo(_printed(str(found or "perplexity: none, for want of a tokenizer")))
    raise typer.Exit(1 if needs.problem else 0)


def _list(as_json: bool) -> None:
    from onestem.models.families import FAMILIES
    from onestem.models.local import local_models

    known, here = {name: family.models for name, family in FAMILIES.items()}, local_models()
    if as_json:
        listed = [asdict(one) | {"path": str(one.path)} for one in here]
        typer.echo(json.dumps({"families": known, "here": listed}))
        return
    typer.echo("Families:")
    _columns(known.items())
    if here:
        typer.echo("\nOn this machine (`onestem chat NAME`):")
        _columns((one.name, _told(one)) for one in here)


def _told(one: LocalModel) -> str:
    lacks = f"; lacks {', '.join(one.lacks)}" if one.lacks else ""
    return f"{_size(one.num_bytes)}, {one.kept_by}: {one.path}{lacks}"


def _columns(rows: Iterable[tuple[str, str]]) -> None:
    listed = list(rows)
    width = max(len(name) for name, _ in listed)
    for name, rest in listed:
        typer.echo(_printed(f"  {name:{width}}  {rest}"))


def _printed(line: str) -> str:
    """A line in which control characters, and bytes of file names that are no UTF-8, are
    escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def _errors(engine: EngineOptions, needs: Needs, original: Path | None) -> Iterator[FormatError]:
    import torch

    from onestem.models.format_errors import format_errors

    return format_errors(
        Path(needs.path),
        dtype=getattr(torch, needs.dtype),
        device=torch.device(needs.device),
        quantization=engine.quantization,
        original=original,
    )


def _error_line(one: FormatError) -> str:
    weights = "" if one.weights is None else f"weights off by {one.weights:.2%}, "
    return f"{one.module}: {one.kind}: {weights}products by {one.products:.2%}"


def _show(needs: Needs) -> None:
    copies = f", with copies: {', '.join(needs.copies)}" if needs.copies else ""
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
        "quantised": needs.quantization or "no",
        "runs on": f"{needs.device}, in {needs.dtype}",
        "weights in files": _size(needs.file_bytes),
        "weights in memory": _size(needs.weight_bytes) + copies,
        "KV memory of a token": f"{needs.kv_bytes_per_token / 2**10:g} KiB",
        "tokens in KV memory": needs.kv_tokens,
        **({"recurrent states": _states(needs)} if needs.state_bytes else {}),
        "longest sequence": needs.max_model_len,
        "ends of answers": ", ".join(f"{name} ({i})".strip() for i, name in needs.ends.items())
        or "none",
        "problem": needs.problem or "none",
    }.items():
        typer.echo(_printed(f"{name}: {value}"))


def _states(needs: Needs) -> str:
    return f"{_size(needs.state_bytes)} a sequence or kept prefix, {needs.num_states} in KV memory"


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "none"
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 / 10 else (2**20, "MiB")
    return f"{num_bytes / unit:.2f} {name}"

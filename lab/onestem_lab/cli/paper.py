"""`onestem bench paper`: tables and figures of the papers, run by this engine."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onestem.cli import options
from onestem.files import check_place, write_whole
from onestem.interrupts import exit_on_sigterm
from onestem.options import EngineOptions
from onestem_lab.cli.given import refuse_given

if TYPE_CHECKING:
    from onestem_lab.papers.bench import Bench
    from onestem_lab.papers.experiment import Experiment, Step

__all__ = ["paper"]


ENGINE = (
    "model",
    "device",
    "dtype",
    "kv_memory",
    "share",
    "impl",
    "threads",
    "seed",
    "tensor_parallel_size",
)


@options.with_options
def paper(
    context: typer.Context,
    engine: Annotated[EngineOptions, options.Only(*ENGINE)],
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Table or figure, or all; without it: a list."),
    ] = None,
    scale: Annotated[
        float,
        typer.Option(help="Factor of lengths, requests, batches and models; 1: the paper's."),
    ] = 1.0,
    part: Annotated[
        float,
        typer.Option(
            help="Factor of the numbers of requests and of a sweep's points; lengths, batches and "
            "models keep their size."
        ),
    ] = 1.0,
    repeat: Annotated[
        int,
        typer.Option(help="Times to run it, all series in turns; medians count, the file has all."),
    ] = 1,
    against: Annotated[
        str,
        typer.Option(
            help="Peers, with commas: sdpa, cudnn, flashinfer, flash_attn, flash_attn3 for "
            "attention, vllm for jobs; one that is not installed is named and left out."
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of NAME.json and NAME.svg; all needs one, and writes paper.html too.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON line for each instead of a table.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Run a table or figure of the four papers; print it beside theirs, and whether claims hold.

    Models are the papers' shapes with random weights unless --model names another. Every number of
    ours is measured or counted in this run: with --share off, full and planned gain nothing. Exit
    code 1: with all, some could not run.
    """
    from onestem.errors import ConfigError
    from onestem_lab.papers.bench import Bench
    from onestem_lab.papers.registry import EXPERIMENTS, find

    if name is None:
        if out is not None or against or (scale, part, repeat) != (1, 1, 1):
            raise ConfigError("a list takes no options: name a table or figure, or all")
        _list(EXPERIMENTS.values(), as_json)
        return
    if name != "all":
        _refuse_unread(context, find(name))
    if out is not None:  # before anything is measured
        _check_folder(out, EXPERIMENTS if name == "all" else [find(name).name])
    peers = [peer.strip() for peer in against.split(",") if peer.strip()]
    with (
        exit_on_sigterm(),
        Bench(engine, scale=scale, part=part, repeat=repeat, against=peers) as bench,
    ):
        run = partial(_run, bench=bench, out=out, as_json=as_json, quiet=quiet)
        if name != "all":
            run(find(name))
        elif out is None:
            raise ConfigError("all writes a report: say where with --out DIR")
        elif _run_all(EXPERIMENTS.values(), run, out):
            raise typer.Exit(1)


def _refuse_unread(context: typer.Context, experiment: Experiment) -> None:
    from onestem_lab.papers.run import READ_WITHOUT_MODEL

    read = READ_WITHOUT_MODEL.get(type(experiment.measure), ENGINE)
    unread = [name for name in ENGINE if name not in read]
    refuse_given(context, unread, f"has no effect on {experiment.name}")


def _run_all(
    experiments: Iterable[Experiment], run: Callable[[Experiment], dict[str, Any]], out: Path
) -> int:
    """Run what can run, and write the report; returns how many could not run."""
    from onestem.errors import OnestemError
    from onestem_lab.papers.report import html_of

    results, refused = [], 0
    for experiment in experiments:
        try:
            results.append((experiment, run(experiment)))
        except OnestemError as error:
            print(f"onestem: {experiment.name}: {error}", file=sys.stderr)
            refused += 1
    _write_text(out / "paper.html", html_of(results))
    return refused


def _check_folder(out: Path, names: Iterable[str]) -> None:
    """Make the folder of --out; raise an error where the results of `names` cannot be written."""
    from onestem.errors import ConfigError

    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"out is {out}: {error.strerror}: choose another folder") from None
    for file in ("paper.html", *(f"{name}.{kind}" for name in names for kind in ("json", "svg"))):
        check_place(out / file, "another folder")


def _write_text(path: Path, text: str) -> None:
    from onestem.errors import ConfigError

    try:
        write_whole(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: choose another folder for --out") from None


def _list(experiments: Iterable[Experiment], as_json: bool) -> None:
    listed = [
        {
            "name": each.name,
            "also": list(each.also),
            "source": each.source,
            "title": each.title,
        }
        for each in experiments
    ]
    if as_json:
        typer.echo(json.dumps(listed))
        return
    width = max(len(each["name"]) for each in listed)
    for each in listed:
        also = f" (also {', '.join(each['also'])})" if each["also"] else ""
        typer.echo(f"{each['name']:{width}}  {each['title']}{also}")


def _run(
    experiment: Experiment, *, bench: Bench, out: Path | None, as_json: bool, quiet: bool
) -> dict[str, Any]:
    """Run one experiment, show it and write it."""
    from onestem_lab.papers.run import run_experiment

    command = "onestem " + shlex.join(sys.argv[1:])

    def progress(steps: Sequence[Step]) -> Iterator[Step]:
        return iter(steps) if quiet else _bar(experiment.name, steps)

    result = run_experiment(experiment, bench, command, progress)
    _show(experiment, result, as_json)
    if out is not None:
        _write(experiment, result, out)
    return result


def _bar(name: str, steps: Sequence[Step]) -> Iterator[Step]:
    from rich.console import Console
    from rich.progress import track

    return iter(track(steps, name, console=Console(stderr=True)))


def _show(experiment: Experiment, result: dict[str, Any], as_json: bool) -> None:
    from onestem_lab.papers.table import table_of, text_of

    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(f"{experiment.name}: {experiment.title} ({experiment.source})\n")
    typer.echo(text_of(table_of(experiment, result)) + "\n")


def _write(experiment: Experiment, result: dict[str, Any], out: Path) -> None:
    from onestem_lab.papers.report import picture_of

    _write_text(out / f"{experiment.name}.json", json.dumps(result, indent=1) + "\n")
    _write_text(out / f"{experiment.name}.svg", picture_of(experiment, result))

"""`onestem plan`: how much sharing a job has, before anything is computed."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onestem.cli import options
from onestem.cli.batch import Input, JobProgress, KeepGoing, Quiet, Schemas, open_input
from onestem.interrupts import exit_on_sigterm
from onestem.options import EngineOptions, InputOptions

if TYPE_CHECKING:
    from onestem.report import Price

# Options of the engine that a plan depends on.
PLANNED_BY = (
    "model",
    "device",
    "dtype",
    "quantization",
    "kv_memory",
    "max_model_len",
    "max_step_tokens",
    "threads",
    "tensor_parallel_size",
    "max_num_seqs",
    "levels",
    "order",
)

Device = Annotated[
    str | None,
    typer.Option(
        help="auto, cpu, cuda or cuda:N; or a device that this machine need not have: h200.",
        rich_help_panel=options.ENGINE,
    ),
]
Predicts = Annotated[
    bool,
    typer.Option(
        "--predict/--no-predict",
        help="Predict what the job takes. The first time, this device's rates are measured.",
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4096,
        help="Also predict the job on this number of engines of this kind (docs/replicas.md).",
    ),
]
Advises = Annotated[
    bool,
    typer.Option(
        "--advice/--no-advice",
        help="Show what another order of the prompts' fields would save.",
    ),
]


@options.with_options
def plan(
    input_file: Input,
    rows: InputOptions,
    engine: Annotated[EngineOptions, options.Only(*PLANNED_BY)],
    device: Device = None,
    predicts: Predicts = True,
    schemas: Schemas = None,
    replicas: Replicas = None,
    advises: Advises = True,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a report to look at (docs/plan-report.md)."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the job's lines, as they are, in the order of the plan.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --write.")] = False,
    price_per_hour: Annotated[
        str | None,
        typer.Option(metavar="PRICE", help="The device's, to show costs: 2.50, $2.50 or 2.50EUR."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
    keep_going: KeepGoing = False,
    quiet: Quiet = False,
) -> None:
    """Group and order a job's prompts; report what sharing saves, and predict what the job takes
    with sharing and without (docs/cost-model.md). No weights are loaded.

    If none of the first 256 lines can be answered, the job is refused (see --keep-going).

    The file of --write is for engines that keep prefixes and take lines as they come. Lines that
    cannot be answered, and blank ones, are the last.

    Exit code: 0 if every line can be answered, 1 if some cannot, 2 if the job could not be planned
    or was refused.
    """
    from onestem.jobs import plan_file
    from onestem.report import Price

    source = open_input(input_file, rows)
    price = None if price_per_hour is None else Price.read(price_per_hour)
    with (
        exit_on_sigterm(),
        tempfile.TemporaryDirectory(prefix="onestem-plan-") as folder,
        JobProgress(quiet) as bar,
    ):
        report = plan_file(
            source,
            Path(folder),
            options=engine,
            schemas=schemas or (),
            keep_going=keep_going,
            predicts=predicts,
            replicas=replicas,
            advises=advises,
            price=price,
            html=html,
            write=write,
            force=force,
            on_progress=bar,
            on_first_error=lambda error: print(f"onestem: {error}", file=sys.stderr),
        )
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _show(report, engine.levels, price, has_template=source.recipe is not None)
    raise typer.Exit(1 if report["failed_lines"] else 0)


def _show(report: dict[str, Any], levels: str, price: Price | None, *, has_template: bool) -> None:
    from onestem.batch import OpenEnded

    typer.echo(
        f"{report['requests']} requests in {report['groups']} groups, "
        f"{report['failed_lines']} lines that cannot be answered"
    )
    if report["open_ended"]["requests"]:
        typer.echo(OpenEnded(**report["open_ended"]).line(has_template=has_template))
    typer.echo(f"{report['logical_prompt_tokens']} prompt tokens")
    shown = {"one_level": "one level", "all_levels": f"{report['levels']} levels"}
    for name in list(shown)[: report["levels"]]:  # of one level both are the same
        computed, saving = report[f"processed_tokens_{name}"], report[f"saving_{name}"]
        saved = f"computes {computed} of them, saves {100 * saving:.1f}%"
        typer.echo(f"  sharing {shown[name]:9} {saved}")
    typer.echo(
        f"  this plan ({levels}) computes {report['processed_tokens']} of them, "
        f"saves {100 * report['saving']:.1f}%"
    )
    for group in report["largest_groups"]:
        text = "" if group["text"] is None else f": {group['text']!r}"
        typer.echo(
            f"  {group['requests']} requests share {group['prefix_tokens']} tokens "
            f"({group['kv_bytes'] / 2**20:.2f} MiB of KV memory){text}"
        )
    typer.echo(f"planned in {report['planning_seconds']:.2f} s")
    if report["forecast"] is not None:
        _show_forecast(report["forecast"], report["logical_prompt_tokens"])
        if report["open_ended"]["requests"]:
            tokens = report["assumed_tokens"]
            typer.echo(f"  an answer without max_tokens is taken to have {tokens} tokens")
    if price is not None:
        told = {"full": "sharing", "off": "without", "reordered": "with fields reordered"}
        costs = (
            f"{price.text(report['costs'][mode])} {name}"
            for mode, name in told.items()
            if mode in report["costs"]
        )
        typer.echo(f"costs at {price} an hour: {', '.join(costs)}")
    if report["dealt"] is not None:
        _show_dealt(report["dealt"], report["logical_prompt_tokens"])
    if report["advice"] is not None and report["advice"]["moved"]:
        _show_advice(report)
    if report["written"] is not None:
        typer.echo("{path}: {lines} lines, in the order of the plan".format(**report["written"]))


def _show_advice(report: dict[str, Any]) -> None:
    advice, forecast = report["advice"], report["forecast_reordered"]
    names = [field["name"] for field in advice["fields"]]
    seconds = "" if forecast is None else f", {forecast['full']['seconds']:.1f} s"
    typer.echo(
        f"another order of the fields would save {100 * advice['saving']:.1f}%{seconds} "
        f"({', '.join(names[i] for i in advice['moved'])} moved):\n"
        f"  now:    {' | '.join(names)}\n"
        f"  better: {' | '.join(names[i] for i in advice['order'])}"
    )


def _show_forecast(found: dict[str, Any], prompt_tokens: int) -> None:
    typer.echo(f"predicted on {found['device']} (rates {found['rates']}):")
    names = {"full": "sharing", "storage": "stored once, read by each", "off": "without sharing"}
    if found["off"]["computed_prompt_tokens"] > prompt_tokens:
        names["off"] += ", a prompt for each answer"
    for share, name in names.items():
        one = found[share]
        typer.echo(
            f"  {name}: {one['seconds']:.1f} s, {one['computed_prompt_tokens']} prompt tokens "
            f"computed, maximum {one['peak_kv_tokens']} tokens in KV memory"
        )


def _show_dealt(found: dict[str, Any], prompt_tokens: int) -> None:
    typer.echo(f"predicted on {found['replicas']} replicas, each of this kind:")
    names = {
        "groups": "groups kept whole",
        "prefix-hash": "by the hash of the prefix",
        "round-robin": "requests in turn",
        "random": "requests at random",
    }
    for how, name in names.items():
        one = found[how]
        saved = 100 * (1 - one["computed_prompt_tokens"] / prompt_tokens) if prompt_tokens else 0.0
        typer.echo(
            f"  {name}: {one['seconds']:.1f} s, {one['computed_prompt_tokens']} prompt tokens "
            f"computed ({saved:.1f}% saved), maximum {one['peak_kv_tokens']} tokens in KV memory"
        )
    groups = found["groups"]
    typer.echo(
        f"  replicas that get groups take {min(groups['replica_seconds']):.1f} to "
        f"{max(groups['replica_seconds']):.1f} s; {groups['computed_again_tokens']} prompt tokens "
        f"are computed more than once, {groups['num_cuts']} groups are cut"
    )

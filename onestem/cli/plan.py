"""`onestem plan`: how much sharing a job has, before anything is computed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from onestem.cli import options

__all__ = ["plan"]


def plan(
    input_file: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="OpenAI batch file.")],
    model: options.Model = "embedded",
    levels: Annotated[str, typer.Option(help="all, or one (a single shared level).")] = "all",
    kv_memory: options.KvMemory = "auto",
    schemas: Annotated[
        list[Path] | None,
        typer.Option(
            "--schema", metavar="FILE", help="PML schema that lines may name (may be repeated)."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    """Group and order a job's prompts; report what sharing saves. No weights are loaded."""
    from onestem.errors import ConfigError, JobError
    from onestem.jobs import plan_file

    if levels not in ("one", "all"):
        raise ConfigError(f"levels is {levels!r}, expected one or all")
    if not input_file.is_file():
        raise JobError(f"{input_file} is no file")
    with tempfile.TemporaryDirectory(prefix="onestem-plan-") as folder:
        report = plan_file(
            input_file,
            Path(folder),
            model=model,
            levels=levels,
            kv_memory=kv_memory,
            schemas=schemas or (),
        )
    if as_json:
        typer.echo(json.dumps(report))
        return
    typer.echo(
        f"{report['requests']} requests in {report['groups']} groups, "
        f"{report['failed_lines']} lines that cannot be answered"
    )
    typer.echo(f"{report['logical_prompt_tokens']} prompt tokens")
    for name, level in (("one", "one level"), ("all", f"{report['levels']} levels")):
        computed = report[f"processed_tokens_{'one_level' if name == 'one' else 'all_levels'}"]
        saving = report["saving_one_level" if name == "one" else "saving_all_levels"]
        typer.echo(f"  sharing {level:9} computes {computed} of them, saves {100 * saving:.1f}%")
    for members, prefix in report["largest_groups"]:
        typer.echo(f"  {members} requests behind {prefix} tokens")
    typer.echo(f"planned in {report['planning_seconds']:.2f} s")

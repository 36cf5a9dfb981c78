"""`onestem bench pml`: prompts of modules, with modules cached against everything computed."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from onestem.cli import options
from onestem.options import EngineOptions
from onestem.threads import ram_bytes
from onestem_lab.cli.given import refuse_given

__all__ = ["pml"]


# Options of one case alone.
FIRST_TOKEN = ("cached", "modules", "tier", "repeat")
LIBRARY = ("prompts", "library", "module_tokens", "imports", "output", "moved")


@options.with_options
def pml(
    context: typer.Context,
    engine: EngineOptions,
    case: Annotated[
        str,
        typer.Option(
            help="first-token: one prompt, against isolation=off; library: many prompts over some "
            "modules (compare --share full with storage)."
        ),
    ] = "first-token",
    cached: Annotated[int, typer.Option(help="first-token: tokens of all modules.", min=1)] = 5000,
    modules: Annotated[int, typer.Option(help="first-token: modules.", min=1)] = 5,
    tier: Annotated[
        str, typer.Option(help="first-token: where the modules are: device, host or disk.")
    ] = "device",
    repeat: Annotated[int, typer.Option(help="first-token: prompts measured.", min=1)] = 3,
    prompts: Annotated[int, typer.Option(help="library: prompts.", min=1)] = 64,
    library: Annotated[int, typer.Option(help="library: modules.", min=1)] = 10,
    module_tokens: Annotated[int, typer.Option(help="library: tokens of each.", min=1)] = 1000,
    imports: Annotated[int, typer.Option(help="library: modules that a prompt imports.")] = 3,
    output: Annotated[int, typer.Option(help="library: tokens sampled per prompt.", min=1)] = 64,
    moved: Annotated[
        bool, typer.Option("--moved", help="library: none where it was stored, in any order.")
    ] = False,
    new: Annotated[int, typer.Option(help="Tokens of text of each prompt.", min=1)] = 50,
    isolation: Annotated[
        str, typer.Option(help="What cached tokens attend to: anchored or isolated.")
    ] = "anchored",
    seed: Annotated[int, typer.Option(help="Seed of the token ids.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line, not a table.")] = False,
) -> None:
    """Time prompts of modules over random token ids, greedy.

    first-token prints the time to the first token with the modules in a tier, and with the same
    prompt computed whole. It also prints the latter's speed as a share of the layers' matrix
    products alone. The disk tier is measured with its files dropped from the page cache.
    """
    from onestem.errors import ConfigError
    from onestem.pml import parse_isolation
    from onestem_lab.pml import (
        FirstTokenCase,
        LibraryCase,
        Tier,
        measure_first_token,
        measure_library,
    )

    who = parse_isolation(isolation)
    if who == "off":
        raise ConfigError("isolation is off, which first-token measures anyway: choose another")
    if tier not in get_args(Tier):
        raise ConfigError(f"tier is {tier!r}, expected device, host or disk")
    if case not in ("first-token", "library"):
        raise ConfigError(f"case is {case!r}, expected first-token or library")
    if case == "library":
        refuse_given(context, FIRST_TOKEN, "is of --case first-token")
        asked = LibraryCase(
            prompts=prompts,
            library=library,
            module_tokens=module_tokens,
            imports=imports,
            new=new,
            output=output,
            moved=moved,
            isolation=who,
            seed=seed,
        )
        result = measure_library(options.load_llm(engine), asked)
    else:
        refuse_given(context, LIBRARY, "is of --case library")
        first = FirstTokenCase(
            cached=cached,
            new=new,
            modules=modules,
            isolation=who,
            tier=cast(Tier, tier),
            repeat=repeat,
            seed=seed,
        )
        with tempfile.TemporaryDirectory(prefix="onestem-bench-") as folder:
            tiers: dict[str, dict[str, Any]] = {
                "device": {},
                "host": {"host_kv": ram_bytes() // 2},
                "disk": {"disk_kv": folder, "disk_kv_size": "256GiB"},
            }
            llm = options.load_llm(engine.replace(**tiers[tier]))
            result = measure_first_token(llm, first, Path(folder))
    _show(result, str(engine.model), as_json)


def _show(result: dict[str, Any], model: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"model": model, **result}))
        return
    print(f"{model}, {result['dtype']}, {result['device']}", file=sys.stderr)
    for name, value in result.items():
        typer.echo(f"{name:28} {value}")

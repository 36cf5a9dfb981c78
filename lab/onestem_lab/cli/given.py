"""Options that were typed, and that something else typed leaves no use for."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from onestem.errors import ConfigError

__all__ = ["refuse_given"]


def refuse_given(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raise `ConfigError` if one of these options is on the command line.

    Args:
        names: of parameters.
        why: after the option's name.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = next(one for one in context.command.params if one.name == name).opts[0]
            raise ConfigError(f"{flag} {why}: leave it out")

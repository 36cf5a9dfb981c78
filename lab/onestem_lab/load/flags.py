"""Options as somebody types them."""

from __future__ import annotations

from typing import Any

from onestem.options import Options

__all__ = ["flags_of"]


def flags_of(options: Options) -> list[str]:
    """Command line arguments that give these options."""
    return [
        _argument(named, getattr(options, name))
        for name, named in options.offered().items()
        if name in options.model_fields_set and getattr(options, name) is not None
    ]


def _argument(named: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{named}" if value else f"--no-{named}"
    return f"--{named}={value}"

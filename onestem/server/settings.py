"""What `onestem serve` is told."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onestem.errors import ConfigError
from onestem.server.foreign import hosts_of
from onestem.server.tenants import Keys

__all__ = ["Settings", "default_state"]

MIB = 1 << 20


def default_state(port: int) -> Path:
    """Where a server of this port keeps its state unless told otherwise."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "onestem" / f"serve-{port}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of one server.

    Attributes:
        model: as the user names it; `engine` are the other options of `LLM`.
        model_names: what requests may call it; the first is shown.
        apps: name -> source of the operator's prefixes; schemas: files of its PML schemas.
        max_queue: most requests of a key that wait in front of the engine.
        timeout: seconds that a request may take unless it says otherwise.
        max_body_bytes: of a JSON body; max_file_bytes: of an upload.
        grace: seconds that running streams get when the server stops.
        engine_timeout: seconds without a sign of an engine that has work, until it is started
            again; 0: never.
        stream_interval: least tokens of a stream's chunk (see `chunk_size`).
        allowed_hosts: what it may be called; none: as fits `host` (see `foreign`).
    """

    model: str = "embedded"
    engine: Mapping[str, Any] = field(default_factory=dict)
    model_names: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    state: Path
    apps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    schemas: Sequence[Path] = ()
    keys: Keys = field(default_factory=Keys)
    max_queue: int = 1024
    timeout: float = 600.0
    max_body_bytes: int = 8 * MIB
    max_file_bytes: int = 512 * MIB
    grace: float = 30.0
    stream_interval: int = 1
    engine_timeout: float = 120.0
    allowed_hosts: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, least in (
            ("max_queue", 1),
            ("timeout", 0.001),
            ("max_body_bytes", 1024),
            ("max_file_bytes", 1024),
            ("grace", 0),
            ("stream_interval", 1),
            ("engine_timeout", 0),
        ):
            value = getattr(self, name)
            if not value >= least:
                raise ConfigError(f"{name} is {value}, expected at least {least}")
        hosts_of(self.host, self.allowed_hosts)

    @property
    def names(self) -> Sequence[str]:
        return self.model_names or (self.model,)

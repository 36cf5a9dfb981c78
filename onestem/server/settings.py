"""Options of `onestem serve`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from onestem.beside_vllm import SERVE, Name
from onestem.errors import ConfigError
from onestem.options import EngineOptions, Memory, Options, Path_, parse_memory

AsTuple = BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)
Texts = Annotated[tuple[str, ...], AsTuple]
LEAST_BYTES = 1024


class Settings(Options):
    """Options of one server."""

    table: ClassVar[str] = "serve"
    beside: ClassVar[Mapping[str, Name]] = SERVE

    engine: EngineOptions = Field(default=EngineOptions(), json_schema_extra={"flag": ""})
    """Options of its engine."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0: a free one."""

    allowed_hosts: Texts = ()
    """Host that requests may name: a name, .NAME for its subdomains, * for any (may be repeated;
    default: localhost for a loopback --host, else any)."""

    apps: Texts = Field(default=(), json_schema_extra={"flag": "app", "metavar": "NAME=FILE"})
    """A prefix for all: a text, or messages in a .json file (may be repeated)."""

    schemas: Annotated[tuple[Path_, ...], AsTuple] = Field(
        default=(), json_schema_extra={"flag": "schema", "metavar": "FILE"}
    )
    """A PML schema for all (may be repeated)."""

    encode_schemas: bool = False
    """Compute the modules of all --schema before requests are taken."""

    api_key_file: Path_ | None = None
    """File of accepted keys, a line each: name:key[:weight]."""

    served_model_name: Texts = ()
    """Name of the model in requests (may be repeated; default: --model, or a GGUF file's short
    name)."""

    state: Path_ | None = None
    """Folder of files, batches and prefixes (default: ~/.local/state/onestem/serve-PORT)."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    """Temperature of requests that have none (default: the model's)."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """top_p of requests that have none (default: the model's)."""

    max_queue: int = Field(default=1024, ge=1)
    """Maximum queued requests of a key. More get a 429."""

    timeout: float = Field(default=600.0, ge=0.001)
    """Seconds that a request may take, unless it sets its own timeout."""

    max_body: Memory = "8MiB"
    """Largest request body."""

    max_bodies: Memory = "64MiB"
    """Large request bodies that are read at once, beside one of each key; others wait, at their
    clients."""

    max_file: Memory = "512MiB"
    """Largest uploaded file."""

    max_key_files: Memory = "100GiB"
    """Files of a key in all: uploads, outputs and errors of batches."""

    grace: float = Field(default=30.0, ge=0)
    """Seconds that running answers get when the server stops."""

    stream_interval: int = Field(default=1, ge=1)
    """Minimum tokens of a stream's chunk; the first is sent at once. Under load: more."""

    engine_timeout: float = Field(default=120.0, ge=0)
    """Restart an engine that has work and is silent for this long, in seconds (0: never)."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """debug, info, warning or error."""

    log_format: Literal["text", "json"] | None = None
    """text for people, json for programs (default: text on a terminal)."""

    @model_validator(mode="after")
    def _check_schemas(self) -> Settings:
        if self.encode_schemas and not self.schemas:
            raise ConfigError("encode_schemas is set and there is no schema: name one (--schema)")
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Settings:
        for name in ("max_body", "max_bodies", "max_file", "max_key_files"):
            size = parse_memory(getattr(self, name))
            if size < LEAST_BYTES:
                raise ConfigError(f"{name} is {size} bytes, expected at least {LEAST_BYTES}")
        return self

    @property
    def folder(self) -> Path:
        """Where the server keeps its state."""
        if self.state is not None:
            return Path(self.state)
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(base) / "onestem" / f"serve-{self.port}"

"""`onestem serve`: OpenAI's API over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from onestem.cli import options
from onestem.errors import ConfigError

__all__ = ["serve"]

MIB = 1 << 20


def serve(
    name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model directory, hub name (owner/name), or 'embedded' (default: embedded)."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")] = 8000,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="Host that requests may name: a name, .NAME for its subdomains, * for any (may be "
            "repeated; default: localhost for a loopback --host, else any).",
        ),
    ] = None,
    app: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="A prefix for all: a text, or messages in a .json file (may be repeated).",
        ),
    ] = None,
    schema: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A PML schema for all (may be repeated)."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Keys that are let in, a line each: name:key[:weight].")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What requests call the model (may be repeated; default: --model)."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder of files, batches and prefixes "
            "(default: ~/.local/state/onestem/serve-PORT)."
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Most requests of a key that wait; more are told to come back.")
    ] = 1024,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a request may take unless it says otherwise.")
    ] = 600.0,
    max_body: Annotated[str, typer.Option(help="Largest request body.")] = "8MiB",
    max_file: Annotated[str, typer.Option(help="Largest uploaded file.")] = "512MiB",
    grace: Annotated[
        float, typer.Option(help="Seconds that running answers get when the server stops.")
    ] = 30.0,
    stream_interval: Annotated[
        int,
        typer.Option(
            help="Least tokens of a stream's chunk; the first is sent at once. Under load: more."
        ),
    ] = 1,
    engine_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds without a sign of an engine that has work, until it is started again; "
            "0: never."
        ),
    ] = 120.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[
        str | None,
        typer.Option(help="text for people, json for programs (default: text on a terminal)."),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kv_memory: options.KvMemory = "auto",
    max_model_len: options.MaxModelLen = None,
    max_step_tokens: options.MaxStepTokens = None,
    max_step_ms: Annotated[
        float | None,
        typer.Option(
            help="About what a step may take, in milliseconds, while it computes prompts "
            "(default: 300 CPU, 100 GPU; 0: no limit)."
        ),
    ] = None,
    module_host_memory: Annotated[
        str, typer.Option(help="Host memory for PML modules that KV memory has no room for.")
    ] = "0",
    module_disk: Annotated[
        Path | None, typer.Option(help="Folder in which PML modules outlive the server.")
    ] = None,
    module_disk_memory: Annotated[
        str, typer.Option(help="Most that PML modules take there.")
    ] = "16GiB",
    page_size: options.PageSize = 16,
    share: options.Share = "full",
    impl: options.Impl = "auto",
    threads: options.Threads = None,
    random_weights: options.RandomWeights = False,
    seed: options.Seed = None,
) -> None:
    """Serve a model: chats, completions, files, batches, prefixes, PML; a page at /.

    The openai client works with base_url=http://HOST:PORT/v1. Logs are lines on stderr.
    SIGTERM or Ctrl-C ends it: running answers end, batches are put down and go on with the next
    start.
    """
    model = _one_model(name, model)
    _set_up_logs(log_level, log_format, model)
    from onestem.llm import parse_memory
    from onestem.server.prefixes import read_app
    from onestem.server.run import serve as run
    from onestem.server.settings import Settings, default_state
    from onestem.server.tenants import Keys, read_key_file

    engine: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "kv_memory": kv_memory,
        "max_model_len": max_model_len,
        "max_step_tokens": max_step_tokens,
        "max_step_ms": max_step_ms,
        "module_host_memory": module_host_memory,
        "module_disk": module_disk,
        "module_disk_memory": module_disk_memory,
        "page_size": page_size,
        "share": share,
        "impl": impl,
        "threads": threads,
        "random_weights": random_weights,
        "seed": seed,
    }
    settings = Settings(
        model=model,
        engine=engine,
        model_names=served_model_name or (),
        host=host,
        port=port,
        state=state or default_state(port),
        apps=dict(map(read_app, app or ())),
        schemas=schema or (),
        keys=read_key_file(api_key_file) if api_key_file is not None else Keys(),
        max_queue=max_queue,
        timeout=timeout,
        max_body_bytes=parse_memory(max_body),
        max_file_bytes=parse_memory(max_file),
        grace=grace,
        stream_interval=stream_interval,
        engine_timeout=engine_timeout,
        allowed_hosts=allowed_hosts or (),
    )
    asyncio.run(run(settings))


def _one_model(name: str | None, option: str | None) -> str:
    if name is not None and option is not None and name != option:
        raise ConfigError(f"the model is {name!r}, and --model is {option!r}: give one of them")
    return name or option or "embedded"


def _set_up_logs(level: str, style: str | None, model: str) -> None:
    from onestem.server.logs import FORMATS, LEVELS, default_format, log, set_up

    style = style or default_format()
    for option, value, known in (("level", level, LEVELS), ("format", style, FORMATS)):
        if value not in known:
            raise ConfigError(f"log-{option} is {value!r}, expected {', '.join(known)}")
    set_up(level, style)
    if style == "text":  # the imports take seconds; a program has no need to know
        log.info("starting", model=model)

"""`onestem serve`: OpenAI's API over HTTP."""

from __future__ import annotations

import asyncio

import typer

from onestem.cli import options
from onestem.options import EngineOptions
from onestem.server.settings import Settings


@options.with_options
def serve(
    context: typer.Context,
    server: Settings,
    engine: EngineOptions,
    name: options.Model = None,
) -> None:
    """Serve a model: chats, completions, files, batches, prefixes, PML; a page at /.

    The openai client works with base_url=http://HOST:PORT/v1. Logs are lines on stderr.
    SIGTERM or Ctrl-C ends it: running answers end, batches stop and go on with the next start.
    """
    engine = options.named_model(context, engine, name)
    _set_up_logs(server, str(engine.model))
    from onestem.server.run import serve as run

    asyncio.run(run(server.replace(engine=engine)))


def _set_up_logs(server: Settings, model: str) -> None:
    from onestem.server.logs import default_format, log, set_up

    style = server.log_format or default_format()
    set_up(server.log_level, style)
    if style == "text":  # the imports take seconds; only people need to know
        log.info("starting", model=model)

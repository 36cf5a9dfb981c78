"""Modules computed before a prompt needs them: a job beside the interactive requests."""

from __future__ import annotations

import asyncio
import secrets
from itertools import islice

from onestem.pml import CompiledPrompt, Encoding
from onestem.request import ONE_TOKEN, Request, RequestOutput
from onestem.server.errors import ApiError, EngineDownError
from onestem.server.link.client import EngineClient
from onestem.server.link.open_jobs import JobNews

WINDOW = 64  # maximum requests in the engine process at once


async def compute_modules(
    client: EngineClient, encoding: Encoding, *, cache_salt: str, common: bool
) -> None:
    """Have all cached text of a schema computed, in the time that interactive requests leave free.

    Args:
        cache_salt: of the prompts that it is for; common: whether it is for prompts of all salts.

    Raises:
        RequestError: the KV memory has no room for a module.
        EngineDownError: the engine is not there, or died; ApiError: it failed.
    """
    job = f"encode-{encoding.layout.schema.name}-{secrets.token_hex(8)}"
    news: asyncio.Queue[JobNews] = asyncio.Queue()
    client.jobs.open(job, news.put_nowait)
    try:
        prompts = enumerate(encoding.prompts())
        while part := [
            _request(f"{job}/{number}", compiled, cache_salt, common)
            for number, compiled in islice(prompts, WINDOW)
        ]:
            for request in part:
                await client.ask("validate", request)
            client.jobs.send(job, part, first=True)  # a client or the start waits for it
            for _ in part:
                completion = (await _next(news)).outputs[0]
                if completion.finish_reason == "error":
                    raise ApiError(500, str(completion.stop_reason), code="engine_error")
    finally:
        client.jobs.close(job)


def _request(name: str, compiled: CompiledPrompt, cache_salt: str, common: bool) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=compiled.ordered_token_ids.tolist(),
        params=ONE_TOKEN,
        pml=compiled,
        cache_salt=cache_salt,
        common_modules=common,
        priority="job",
    )


async def _next(news: asyncio.Queue[JobNews]) -> RequestOutput:
    """The next output of a job. How many requests were taken is no matter: a part is awaited
    whole."""
    while isinstance(one := await news.get(), int):
        pass
    if one is None:
        raise EngineDownError("the engine died while it computed the modules: try again")
    return one

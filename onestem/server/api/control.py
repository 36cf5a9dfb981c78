"""Routes by which a trainer has the engine pause, sleep, and drop its cache: vLLM's, as TRL calls
them. Weights are not taken over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request

from onestem.server.api.callers import Operates
from onestem.server.api.limits import read_limited
from onestem.server.errors import ApiError, EngineDownError

Json = dict[str, Any]
Tag = Literal["weights", "kv_cache"]
MAX_BODY = 65536  # bytes
WEIGHTS = (
    "weights cannot be sent to this server: NCCL groups and LoRA are not there. Train in one "
    "process with onestem.rollouts.trl, or use AsyncLLM.update_weights (docs/rollouts.md)"
)


async def _told_by_query(request: Request, service: Operates) -> None:
    """Refuse a body: it would be ignored."""
    body = await read_limited(request, MAX_BODY)
    if body.strip() not in (b"", b"{}"):
        path = request.url.path
        raise ApiError(400, f"{path} takes no body: give fields in the query, {path}?name=value")


BY_QUERY = [Depends(_told_by_query)]

# Not in the document of OpenAI's API, as vLLM's are not.
control_routes = APIRouter(include_in_schema=False)


@control_routes.post("/pause", dependencies=BY_QUERY)
async def pause(service: Operates, mode: Literal["abort", "keep"] = "abort") -> Json:
    """Compute nothing until /resume. Requests that run get an error (abort) or wait (keep)."""
    await service.client.control("pause")
    if mode == "abort":
        service.client.requests.fail_all(EngineDownError("the server was paused: try again later"))
    return {"status": "paused"}


@control_routes.post("/resume", dependencies=BY_QUERY)
async def resume(service: Operates) -> Json:
    """Go on after /pause."""
    service.client.resume()
    return {"status": "resumed"}


@control_routes.get("/is_paused")
async def is_paused(service: Operates) -> Json:
    """Whether it is paused."""
    return {"is_paused": service.client.is_paused}


@control_routes.post("/sleep", dependencies=BY_QUERY)
async def sleep(service: Operates, level: Annotated[int, Query(ge=1, le=2)] = 1) -> Json:
    """Free KV memory and the weights, which wait in host memory (level 1) or are dropped (2)."""
    if level == 2:
        raise ApiError(501, f"sleep level 2 drops the weights, and {WEIGHTS}", code="unsupported")
    await service.client.control("sleep", level)
    return {"status": "asleep"}


@control_routes.post("/wake_up", dependencies=BY_QUERY)
async def wake_up(service: Operates, tags: Annotated[list[Tag] | None, Query()] = None) -> Json:
    """Take the memory again, for some tags or all."""
    await service.client.control("wake_up", tags)
    return {"status": "asleep" if service.client.sleep_level else "awake"}


@control_routes.get("/is_sleeping")
async def is_sleeping(service: Operates) -> Json:
    """Whether it is asleep."""
    return {"is_sleeping": service.client.sleep_level > 0}


@control_routes.post("/reset_prefix_cache", dependencies=BY_QUERY)
async def reset_prefix_cache(service: Operates, reset_running_requests: bool = False) -> Json:
    """Drop what is cached; `success`: nothing is left but pinned prefixes."""
    return {"success": await service.client.control("reset_prefix_cache", reset_running_requests)}


@control_routes.get("/get_world_size")
async def get_world_size(service: Operates) -> Json:
    """The number of engines: 1."""
    return {"world_size": 1}


@control_routes.get("/server_info")
async def server_info(service: Operates, config_format: Literal["json"] = "json") -> Json:
    """What a trainer asks of the configuration, under vLLM's names."""
    facts = service.client.facts
    assert facts is not None
    model = {"dtype": facts.options.dtype, "max_model_len": facts.max_model_len}
    config = {"model_config": {**model, "logprobs_mode": facts.options.logprobs_mode}}
    return {"vllm_config": {**config, "weight_transfer_config": None}}


async def _refuse(service: Operates) -> Json:
    """Refused: weights are not taken over HTTP."""
    raise ApiError(501, WEIGHTS, code="unsupported")


for path in (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/v1/load_lora_adapter",
):
    control_routes.post(path)(_refuse)

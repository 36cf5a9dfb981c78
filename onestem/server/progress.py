"""What a server says while it starts, for whoever waits for it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onestem.models.config import ModelConfig
from onestem.server.logs import log

if TYPE_CHECKING:
    from onestem.server.service import Service
    from onestem.server.settings import Settings

__all__ = ["say_listening", "say_loaded", "say_loading", "say_prefixes"]

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def say_loading(settings: Settings, path: Path) -> None:
    """A model was found, and its weights are loaded next."""
    log.info("model_found", model=str(settings.engine.model), path=str(path))
    made_up = settings.engine.random_weights
    size = 0 if made_up else sum(file.stat().st_size for file in path.glob("*.safetensors"))
    log.info("loading", weights_bytes=size, dtype=ModelConfig.from_directory(path).torch_dtype)


def say_loaded(service: Service, seconds: float) -> None:
    """The engine has begun to run."""
    facts = service.client.facts
    assert facts is not None
    log.info(
        "loaded",
        kv_tokens=facts.kv_tokens,
        dtype=facts.options.dtype,
        device=facts.options.device,
        attention=facts.options.impl,
        seconds=round(seconds, 3),
    )


def say_prefixes(service: Service) -> None:
    """The operator's prefixes and those of keys are in KV memory."""
    prefixes = service.prefixes.everyone()
    if prefixes:
        tokens = sum(prefix.num_tokens for prefix in prefixes)
        log.info("prefixes_computed", count=len(prefixes), tokens=tokens)


def say_listening(service: Service, host: str, port: int) -> None:
    """Requests are taken: where, and how one is sent."""
    host = f"[{host}]" if ":" in host else host
    log.info("listening", url=f"http://{host}:{port}", model=service.settings.names[0])
    url = f"http://{EVERYWHERE.get(host, host)}:{port}"
    log.info("addresses", page=f"{url}/", api=f"{url}/v1")
    log.info("try", command=_command(service, f"{url}/v1"))


def _command(service: Service, api: str) -> str:
    path, body = _example(service)
    words = ["curl", f"{api}/{path}", "-H", "Content-Type: application/json"]
    if service.keys.needed:
        words += ["-H", "Authorization: Bearer KEY"]
    return shlex.join([*words, "-d", json.dumps({**body, "max_tokens": 40})])


def _example(service: Service) -> tuple[str, dict[str, Any]]:
    if service.tokenizer is None:
        return "completions", {"prompt": [1, 2, 3]}
    if not service.tokenizer.has_chat_template:
        return "completions", {"prompt": "Hello"}
    return "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}

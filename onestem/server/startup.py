"""What a server logs while it starts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from onestem.models.config import ModelConfig
from onestem.models.gguf.file import open_gguf
from onestem.server.logs import log
from onestem.server.served_model import ServedModel
from onestem.server.settings import Settings

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def say_loading(settings: Settings, path: Path) -> None:
    """Log that a model was found, and that its weights are loaded next."""
    log.info("model_found", model=str(settings.engine.model), path=str(path))
    made_up = settings.engine.makes_weights_up
    files = open_gguf(path).parts if path.is_file() else path.glob("*.safetensors")
    size = 0 if made_up else sum(file.stat().st_size for file in files)
    log.info("loading", weights_bytes=size, dtype=ModelConfig.from_directory(path).torch_dtype)


def say_listening(model: ServedModel, host: str, port: int, *, keys: bool) -> None:
    """Log where requests are taken, and how to send one; `keys`: whether one is needed."""
    host = f"[{host}]" if ":" in host else host
    log.info("listening", url=f"http://{host}:{port}", model=model.names[0])
    url = f"http://{EVERYWHERE.get(host, host)}:{port}"
    log.info("addresses", page=f"{url}/", api=f"{url}/v1")
    log.info("try", command=_command(model, f"{url}/v1", keys=keys))


def _command(model: ServedModel, api: str, *, keys: bool) -> str:
    path, body = _example(model)
    words = ["curl", f"{api}/{path}", "-H", "Content-Type: application/json"]
    if keys:
        words += ["-H", "Authorization: Bearer KEY"]
    return shlex.join([*words, "-d", json.dumps({**body, "max_tokens": 40})])


def _example(model: ServedModel) -> tuple[str, dict[str, Any]]:
    if model.tokenizer is None:
        return "completions", {"prompt": [1, 2, 3]}
    if not model.tokenizer.has_chat_template:
        return "completions", {"prompt": "Hello"}
    return "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}

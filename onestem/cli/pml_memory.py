"""The config that `onestem pml memory` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onestem.errors import ConfigError
from onestem.models.find import find_model
from onestem.models.gguf.architectures import config_fields
from onestem.models.gguf.file import is_gguf

__all__ = ["find_config"]


def find_config(model: str) -> dict[str, Any]:
    """The values of a model's `config.json`; `model` may be that file, its folder, a GGUF file, or
    a name.

    Raises:
        ConfigError: there is none, or it is not JSON.
    """
    path = Path(model)
    if is_gguf(path):
        return dict(config_fields(path).values)
    if not path.is_file():
        path = find_model(model) / "config.json"
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no object: it is no model's config")
    text = found.get("text_config")
    return text if isinstance(text, dict) else found

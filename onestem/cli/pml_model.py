"""What the verbs of PML read of a model; no weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import ConfigError
from onestem.models.config import ModelConfig
from onestem.models.fields import read_json
from onestem.models.find import find_model
from onestem.models.gguf.architectures import config_fields
from onestem.models.gguf.file import is_gguf


def load_tokenizer(model: str) -> tuple[Tokenizer, int]:
    """A model's tokenizer, and how many positions the model has."""
    path = find_model(model)
    tokenizer = Tokenizer.from_directory(path)
    if tokenizer is None:
        raise ConfigError(f"model {path} has no tokenizer, and PML is text: choose another model")
    return tokenizer, ModelConfig.from_directory(path).max_position_embeddings


def find_config(model: str) -> dict[str, Any]:
    """The values of a model's `config.json`; `model` may be that file, its folder, a GGUF file, or
    a name.

    Raises:
        ConfigError: there is none, or it holds no object.
    """
    path = Path(model)
    if not path.is_file():
        path = find_model(model)
    if is_gguf(path):
        return dict(config_fields(path).values)
    found = read_json(path if path.is_file() else path / "config.json")
    text = found.get("text_config")
    return text if isinstance(text, dict) else found

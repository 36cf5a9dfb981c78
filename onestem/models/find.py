"""Finds the directory of a model."""

from __future__ import annotations

import os
import re
from pathlib import Path

from onestem.errors import ConfigError
from onestem.native import native
from onestem.options import EMBEDDED
from onestem.shapes import find_shape, is_shape

__all__ = ["find_model"]


def find_model(model: str | os.PathLike[str]) -> Path:
    """The directory of a model: the embedded one, a shape, a directory, or a name on the hub.

    Raises:
        ConfigError: it is none of them, or cannot be fetched.
    """
    name = str(model)
    if name == EMBEDDED:
        return Path(__file__).parents[1] / "embedded" / "model"
    if is_shape(name):
        return find_shape(name)
    path = Path(model)
    if path.is_dir():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ConfigError(f"model {name!r} is no directory and no hub name (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        with native("it cannot be fetched", ConfigError):
            return Path(
                snapshot_download(
                    name,
                    allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"],
                    ignore_patterns=["consolidated*", "original/*"],
                )
            )
    except Exception as error:  # many kinds: offline, unknown name, no access
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model {name!r} is no directory and could not be fetched from the hub: {reason}"
        ) from error

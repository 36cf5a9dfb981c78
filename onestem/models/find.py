"""Finds the directory or the GGUF file of a model."""

from __future__ import annotations

import os
import re
from pathlib import Path

from onestem.beside_vllm import ENGINE
from onestem.checked import show
from onestem.errors import ConfigError, first_line
from onestem.models.gguf.file import is_gguf
from onestem.models.local import find_local
from onestem.native import native
from onestem.options import EMBEDDED
from onestem.shapes import find_shape, is_shape

# Files that hold a model or a part of it, what they are, and the way out.
_CONVERT = "give the directory of the original model (config.json and *.safetensors)"
_FORMATS = {
    ".gguf": ("a GGUF file", "give its path"),
    ".ggml": ("a GGML file, which is not loaded", _CONVERT),
    ".onnx": ("an ONNX graph, which is not loaded", _CONVERT),
    ".bin": (
        "a file of pickled weights, which are not loaded",
        "convert it to safetensors: transformers' from_pretrained(DIR).save_pretrained(OUT)",
    ),
    ".safetensors": ("a file of weights alone", "give its directory, with config.json in it"),
    ".json": ("a file", "give its directory"),
}
_FORMATS |= dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"), ("packed", "unpack it"))
_FORMATS |= dict.fromkeys((".pt", ".pth", ".ckpt", ".h5", ".msgpack"), _FORMATS[".bin"])


def find_model(model: str | os.PathLike[str]) -> Path:
    """The directory of a model: the embedded one, a shape, a directory, or a name on the hub; a
    GGUF file; or either by the short name of a model that is on this machine.

    Raises:
        ConfigError: it is none of them, or cannot be fetched.
    """
    name = str(model)
    if name == EMBEDDED:
        return Path(__file__).parents[1] / "embedded" / "model"
    if is_shape(name):
        return find_shape(name)
    path = Path(model)
    try:
        is_directory = path.is_dir()
    except OSError as error:
        raise ConfigError(f"model {show(name)} cannot be read: {error.strerror}") from None
    if is_directory:
        if not (path / "config.json").exists() and (told := other_format(path)):
            raise ConfigError(f"model {name!r} has no config.json, but {told}")
        return path
    if is_gguf(path):
        return path
    if path.is_file():
        what, way_out = _FORMATS.get(path.suffix.lower(), ("a file", "give a model's directory"))
        raise ConfigError(f"model {name!r} is {what}: {way_out}")
    if path.suffix.lower() in _FORMATS:
        raise ConfigError(f"model {name!r}: there is no such file")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        if (here := find_local(name)) is not None:
            return here
        raise ConfigError(
            f"model {name!r} is no directory, no hub name (owner/name) and no model of this "
            "machine: `onestem models` lists them"
        )
    from huggingface_hub import snapshot_download

    try:
        with native("it cannot be fetched", ConfigError):
            fetched = Path(
                snapshot_download(
                    name,
                    allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"],
                    ignore_patterns=["consolidated*", "original/*"],
                )
            )
    except Exception as error:  # many kinds: offline, unknown name, no access
        raise ConfigError(
            f"model {name!r} is no directory and could not be fetched from the hub: "
            f"{first_line(error)}"
        ) from error
    if not (fetched / "config.json").exists():
        raise ConfigError(
            f"model {name!r} has no config.json on the hub: of GGUF files there fetch one (`hf "
            f"download {name} FILE.gguf`), and give its path or its short name (`onestem models`)"
        )
    return fetched


def other_format(directory: Path) -> str:
    """What a directory holds in place of a model's files, and the way out; "": nothing known."""
    if (directory / "adapter_config.json").is_file():
        return f"a LoRA adapter: {ENGINE['enable_lora'].note}"
    files = sorted(file for file in directory.iterdir() if file.suffix.lower() in _FORMATS)
    found = [file for file in files if file.suffix.lower() != ".json"]
    if not found:
        return ""
    # Weights alone say least: name another form where there is one.
    found.sort(key=lambda file: file.suffix.lower() == ".safetensors")
    what, way_out = _FORMATS[found[0].suffix.lower()]
    return f"{found[0].name}, {what}: {way_out}"

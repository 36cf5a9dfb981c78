"""The tensors of a model directory's safetensors files, checked by name and shape."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onestem.errors import WeightsError
from onestem.models.config import ModelConfig

__all__ = ["Parts", "Shapes", "Source", "checkpoint_source"]

Shapes = Mapping[str, tuple[int, ...]]

# Name of a tensor of all experts `[num, ...]` -> for each expert, the tensors that a file may hold
# instead; one expert's stand one below the other.
Parts = Mapping[str, Sequence[Sequence[str]]]


class Source(Protocol):
    def __call__(self, name: str, as_dtype: torch.dtype | None = None) -> Tensor:
        """A tensor by its name in the checkpoint, on the decoder's device; None: in its dtype."""
        ...


@dataclass(frozen=True)
class _Stored:
    """Where a tensor is, and what it is called there."""

    file: Path
    name: str


# How many names an error spells out before it gives only their number.
NAMES_SHOWN = 4

# Of weights as they are stored.
DTYPES = ("BF16", "F16", "F32", "F64")


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
    prefix = _left_out_prefix(config, stored)
    files = {_renamed(config, prefix + name): _Stored(file, name) for name, file in stored.items()}
    parts = {name: experts for name, experts in parts.items() if name not in files}
    shapes = _shapes_in_files(shapes, parts, files)
    _check_names(directory, config, shapes, files)
    _check_shapes(directory, config, shapes, files)
    # One file is open at a time: the pages of a shard that is done with can be dropped.
    opened = functools.lru_cache(maxsize=1)(_opened)

    def read(name: str, dtype: torch.dtype) -> Tensor:
        tensor: Tensor = opened(files[name].file).get_tensor(files[name].name)
        return tensor.to(device=device, dtype=dtype, copy=True)  # not the mapped file itself

    def source(name: str, as_dtype: torch.dtype | None = None) -> Tensor:
        kind = as_dtype or dtype
        if name not in parts:
            return read(name, kind)
        experts = [torch.cat([read(part, kind) for part in expert]) for expert in parts[name]]
        return torch.stack(experts)

    return source


def _renamed(config: ModelConfig, name: str) -> str:
    renamed = config.tensor_names.renamed
    return name if renamed is None else name.replace(*renamed)


def _shapes_in_files(shapes: Shapes, parts: Parts, files: Mapping[str, _Stored]) -> Shapes:
    """With parts in place of what they make up; where files hold none of them, the whole is what is
    missing."""
    found = dict(shapes)
    for whole, experts in parts.items():
        if any(part in files for expert in experts for part in expert):
            _, rows, *rest = found.pop(whole)
            for expert in experts:
                found |= dict.fromkeys(expert, (rows // len(expert), *rest))
    return found


def _left_out_prefix(config: ModelConfig, files: Mapping[str, Path]) -> str:
    """What stands before every name in a model with a head, where the file has one without."""
    names = config.tensor_names
    without = f"{names.embedding}.weight".removeprefix(names.prefix)
    return names.prefix if without in files else ""


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
    directory: Path, config: ModelConfig, shapes: Shapes, files: Mapping[str, _Stored]
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
        if not name.endswith(names.ignored)
        and not (names.ignored_prefix and name.startswith(names.ignored_prefix))
        and name != f"{names.head}.weight"
    )
    if unknown:
        raise WeightsError(
            f"{directory} holds tensors that {config.architecture} has no place for: "
            f"{_listed(unknown)}"
        )


def _check_shapes(
    directory: Path, config: ModelConfig, shapes: Shapes, files: Mapping[str, _Stored]
) -> None:
    """And dtypes; also of a head that a tied model carries needlessly: another shape is another
    model."""
    names = config.tensor_names
    expected = {f"{names.head}.weight": shapes[f"{names.embedding}.weight"], **shapes}
    found = list(_tensors_in(files, expected))
    wrong = [
        f"{name} is {list(shape)}, expected {list(expected[name])}"
        for name, shape, _ in found
        if shape != expected[name]
    ]
    if wrong:
        raise WeightsError(f"{directory} holds tensors of other shapes: {_listed(wrong)}")
    other = [f"{name} is {dtype}" for name, _, dtype in found if dtype not in DTYPES]
    if other:
        raise WeightsError(
            f"{directory} holds weights that are not floating point: {_listed(other)}; expected "
            f"{', '.join(DTYPES)}: quantized weights are not supported, use the model's original"
        )


def _tensors_in(
    files: Mapping[str, _Stored], names: Iterable[str]
) -> Iterable[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype (safetensors' name of it) of each tensor."""
    present = [name for name in names if name in files]
    by_file: dict[Path, list[str]] = {}
    for name in sorted(present, key=lambda name: str(files[name].file)):
        by_file.setdefault(files[name].file, []).append(name)
    for file, held in by_file.items():
        with _opened(file) as handle:
            for name in held:
                part = handle.get_slice(files[name].name)
                yield name, tuple(part.get_shape()), part.get_dtype()


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown}, ... ({len(names)} in all)"

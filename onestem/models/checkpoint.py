"""The tensors of a model directory's safetensors files, checked by name and shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onestem.errors import WeightsError
from onestem.models.config import ModelConfig

__all__ = ["Shapes", "Source", "check_shapes", "check_unknown", "checkpoint_source", "listed"]

Shapes = Mapping[str, tuple[int, ...]]

# Gives a tensor by its name in the checkpoint, in the decoder's dtype and on its device.
Source = Callable[[str], Tensor]

# How many names an error spells out before it gives only their number.
NAMES_SHOWN = 4

# Of weights as they are stored.
DTYPES = ("BF16", "F16", "F32", "F64")


def checkpoint_source(
    directory: Path, config: ModelConfig, shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> Source:
    """Reads tensors of a directory that holds those of `shapes`, and no others.

    Raises:
        WeightsError: names what is missing, unknown, of another shape or unreadable.
    """
    files = _tensor_files(directory)
    prefix = _left_out_prefix(config, files)
    files = {prefix + name: file for name, file in files.items()}
    _check_names(directory, config, shapes, files)
    tensors = _tensors_in(files, _with_head(config, shapes), prefix)
    check_shapes(directory, config, shapes, tensors, DTYPES)

    def source(name: str) -> Tensor:
        # One file is open at a time: the pages of a shard that is done with can be dropped.
        with _opened(files[name]) as handle:
            tensor: Tensor = handle.get_tensor(name.removeprefix(prefix))
        return tensor.to(device=device, dtype=dtype, copy=True)  # not the mapped file itself

    return source


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
    found = f" (found {listed(others)})" if others else ""
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
        raise WeightsError(f"{index.parent} lacks files that its index names: {listed(absent)}")
    held = {file: set(_names_in(file)) for file in shards}
    lost = sorted(name for name, file in files.items() if name not in held[file])
    if lost:
        raise WeightsError(f"{index} names tensors that its files do not hold: {listed(lost)}")
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
            f"{directory} lacks tensors that {config.architecture} needs: {listed(missing)}"
        )
    check_unknown(directory, config, shapes, files)


def check_unknown(
    holder: object, config: ModelConfig, shapes: Shapes, found: Iterable[str]
) -> None:
    """Raise `WeightsError` for names that the model has no place for. A tied model may come with a
    head."""
    names = config.tensor_names
    unknown = sorted(
        name
        for name in set(found) - set(shapes)
        if not name.endswith(names.ignored) and name != f"{names.head}.weight"
    )
    if unknown:
        raise WeightsError(
            f"{holder} holds tensors that {config.architecture} has no place for: {listed(unknown)}"
        )


def check_shapes(
    holder: object,
    config: ModelConfig,
    shapes: Shapes,
    tensors: Iterable[tuple[str, tuple[int, ...], str]],
    dtypes: Collection[str],
) -> None:
    """Raise `WeightsError` for tensors (name, shape, dtype) of other shapes or dtypes; also for a
    head that a tied model carries needlessly: another shape is another model."""
    expected = _with_head(config, shapes)
    found = [one for one in tensors if one[0] in expected]
    wrong = [
        f"{name} is {list(shape)}, expected {list(expected[name])}"
        for name, shape, _ in found
        if shape != expected[name]
    ]
    if wrong:
        raise WeightsError(f"{holder} holds tensors of other shapes: {listed(wrong)}")
    other = [f"{name} is {dtype}" for name, _, dtype in found if dtype not in dtypes]
    if other:
        raise WeightsError(
            f"{holder} holds weights that are not floating point: {listed(other)}; expected "
            f"{', '.join(dtypes)}: quantized weights are not supported, use the model's original"
        )


def _with_head(config: ModelConfig, shapes: Shapes) -> Shapes:
    names = config.tensor_names
    return {f"{names.head}.weight": shapes[f"{names.embedding}.weight"], **shapes}


def _tensors_in(
    files: Mapping[str, Path], names: Iterable[str], prefix: str
) -> Iterable[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype (safetensors' name of it) of each tensor."""
    present = sorted((name for name in names if name in files), key=lambda name: str(files[name]))
    by_file: dict[Path, list[str]] = {}
    for name in present:
        by_file.setdefault(files[name], []).append(name)
    for file, held in by_file.items():
        with _opened(file) as handle:
            for name in held:
                part = handle.get_slice(name.removeprefix(prefix))
                yield name, tuple(part.get_shape()), part.get_dtype()


def listed(names: list[str]) -> str:
    """Names for an error: the first few, and how many there are."""
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown}, ... ({len(names)} in all)"

"""The safetensors files of a model directory, and which of them holds which tensor."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from onestem.errors import ConfigError, WeightsError
from onestem.files import check_regular, is_file
from onestem.models.fields import read_json
from onestem.models.find import other_format
from onestem.models.gguf.file import open_gguf
from onestem.models.names import listed
from onestem.native import native


def tensor_files(directory: Path) -> dict[str, Path]:
    """Name of each tensor -> the file that holds it, by the directory's index or its one file.

    Raises:
        WeightsError: there is neither, or the index does not describe its files.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return _indexed_files(index)
    file = directory / "model.safetensors"
    if not file.exists():
        raise WeightsError(_no_weights(directory))
    with opened(file) as handle:
        return dict.fromkeys(handle.keys(), file)


def file_bytes(directory: Path) -> int:
    """Bytes of the files that hold a model's tensors; raises `WeightsError` without them."""
    if directory.is_file():
        return open_gguf(directory).num_bytes
    return sum(file.stat().st_size for file in set(tensor_files(directory).values()))


def _no_weights(directory: Path) -> str:
    others = sorted(file.name for file in directory.glob("*.safetensors"))
    if others:
        rest = f", but {listed(others)}: write the weights as transformers does"
    else:
        found = other_format(directory)
        rest = f", but {found}" if found else ": convert the weights to these"
    return (
        f"{directory} has neither model.safetensors nor model.safetensors.index.json{rest}, or ask "
        "for random weights"
    )


def _indexed_files(index: Path) -> dict[str, Path]:
    try:
        names = read_json(index)["weight_map"]
        files = {name: index.parent / str(file) for name, file in names.items()}
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} has no readable weight_map: {error!r}") from None
    shards = set(files.values())
    outside = sorted({str(file) for file in names.values() if not _is_name(file)})
    if outside:
        raise WeightsError(f"{index} names what is no file beside it: {listed(outside)}")
    absent = sorted(file.name for file in shards if not is_file(file))
    if absent:
        raise WeightsError(f"{index.parent} lacks files that its index names: {listed(absent)}")
    held = {}
    for file in sorted(shards):
        with opened(file) as handle:
            held[file] = set(handle.keys())
    lost = sorted(name for name, file in files.items() if name not in held[file])
    if lost:
        raise WeightsError(f"{index} names tensors that its files do not hold: {listed(lost)}")
    # What its files hold beside is read as well, as by transformers: nothing is ignored silently.
    return {name: file for file, names in held.items() for name in names} | files


def _is_name(file: object) -> bool:
    return isinstance(file, str) and file not in ("", "..") and Path(file).name == file


def opened(file: Path) -> safe_open:
    """An open file; raises `WeightsError` if it cannot be read."""
    what = f"{file} cannot be read as safetensors"
    try:
        check_regular(file, WeightsError, most_bytes=None)
        with native(what, WeightsError):
            return safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{what}: {error}") from None

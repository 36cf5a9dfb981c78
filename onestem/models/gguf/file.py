"""A model's GGUF file, or its parts (`NAME-00001-of-00003.gguf`), as one."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onestem.errors import UnsupportedError, WeightsError
from onestem.models.gguf.header import MAGIC, Header, read_header
from onestem.models.names import listed

# Types of numbers, and of blocks: those of nearly all files. Of blocks: bits of a code in memory,
# where five and six become eight, and columns that share a scale.
PLAIN = ("F32", "F16", "BF16")
BLOCKS = {
    "Q8_0": (8, 32), "Q4_0": (4, 32), "Q4_1": (4, 32), "Q5_0": (8, 32), "Q5_1": (8, 32),
    "Q4_K": (4, 32), "Q5_K": (8, 32), "Q6_K": (8, 16), "MXFP4": (4, 32),
}  # fmt: skip
TYPES = (*PLAIN, *BLOCKS)

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)?")
MOST_PARTS = 1 << 12


@dataclass(frozen=True)
class RawTensor:
    """A tensor as it lies in a file.

    Attributes:
        shape: outermost first.
        kind: its type, one of `TYPES`.
        row_bytes: of one row of the last dimension, which is made of whole blocks.
        offset: of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    row_bytes: int
    file: Path
    offset: int

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def part(self, index: int) -> RawTensor:
        """Of a tensor of several matrices: one of them."""
        shape = self.shape[1:]
        rows = math.prod(shape[:-1])
        return replace(self, shape=shape, offset=self.offset + index * rows * self.row_bytes)

    def blocks(self, first: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows as they are stored, uint8 `[rows, row_bytes]`.

        Raises:
            WeightsError: the file cannot be read, or has become shorter.
        """
        stop = self.num_rows if stop is None else stop
        count, start = (stop - first) * self.row_bytes, self.offset + first * self.row_bytes
        try:
            found = np.fromfile(self.file, np.uint8, count, offset=start)
        except OSError as error:
            raise WeightsError(f"{self.file} cannot be read: {error.strerror}") from None
        if len(found) != count:
            raise WeightsError(f"{self.file}: {self.name} was cut while it was read")
        return found.reshape(stop - first, self.row_bytes)


@dataclass(frozen=True)
class GgufFile:
    """A model's fields, of its first part, and the tensors of all parts."""

    header: Header
    parts: tuple[Path, ...]
    tensors: dict[str, RawTensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.stat().st_size for part in self.parts)


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_gguf(path: str | Path) -> GgufFile:
    """The model of a file, which is the first part where there are several. Headers are read once
    for each state of the file.

    Raises:
        WeightsError: a part is missing or damaged, or tensors reach over its end or overlap.
        UnsupportedError: names a tensor of another type than `TYPES`.
    """
    path = Path(path)
    try:
        status = os.stat(path)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None
    return _open(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _open(path: Path, size: int, changed: int) -> GgufFile:
    header = read_header(path)
    tensors: dict[str, RawTensor] = {}
    parts = [header, *map(read_header, _others(header))]
    for part in parts:
        for one in _tensors(part):
            if one.name in tensors:
                told = f"{one.name}, which {tensors[one.name].file} has too"
                raise WeightsError(f"{one.file} holds {told}")
            tensors[one.name] = one
    count = header.fields.get("split.tensors.count")
    if isinstance(count, int) and len(parts) > 1 and count != len(tensors):
        raise WeightsError(
            f"{path}: split.tensors.count is {count}, and its {len(parts)} parts hold "
            f"{len(tensors)}: get them again"
        )
    return GgufFile(header, tuple(part.file for part in parts), tensors)


def _others(header: Header) -> list[Path]:
    """The parts after the first."""
    file, count = header.file, header.fields.get("split.count", 1)
    named = PART.fullmatch(file.name)
    if not isinstance(count, int) or not 0 <= count <= MOST_PARTS:
        raise WeightsError(f"{file}: split.count is {count!r}, expected up to {MOST_PARTS}")
    if count <= 1:
        return []
    first, pattern = f"-00001-of-{count:05}", f"NAME-00001-of-{count:05}.gguf"
    if named is None or int(named[3]) != count:
        raise WeightsError(
            f"{file} is one of {count} parts, expected the name {pattern}: name the parts so"
        )
    if int(named[2]) != 1 or header.fields.get("split.no", 0) != 0:
        raise WeightsError(
            f"{file} is a part of a model: give the first, {named[1]}{first}{named[4] or ''}"
        )
    ends = (f"-{i:05}-of-{count:05}{named[4] or ''}" for i in range(2, count + 1))
    others = [file.with_name(named[1] + end) for end in ends]
    missing = [one.name for one in others if not one.is_file()]
    if missing:
        raise WeightsError(f"{file} lacks parts that belong beside it: {listed(missing)}")
    return others


def _tensors(header: Header) -> Iterator[RawTensor]:
    """Tensors of one part, whose bytes are there."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    names = {kind.value: kind.name for kind in GGMLQuantizationType}
    sizes = {kind.value: size for kind, size in GGML_QUANT_SIZES.items()}
    end, before = 0, ""
    for name, one in sorted(header.tensors.items(), key=lambda item: item[1].offset):
        kind = names.get(one.kind, f"type {one.kind}")
        if kind not in TYPES:
            raise UnsupportedError(
                f"{header.file}: {name} is {kind}, supported: {', '.join(TYPES)}"
            )
        block, block_bytes = sizes[one.kind]
        width = one.shape[-1]
        if width % block:
            raise WeightsError(
                f"{header.file}: {name} is {list(one.shape)}, expected a multiple of {block} in "
                f"the last dimension ({kind})"
            )
        raw = RawTensor(
            name, one.shape, kind, width // block * block_bytes, header.file, one.offset
        )
        if raw.offset < end:
            raise WeightsError(f"{header.file} is damaged: {name} overlaps {before}; get it again")
        end, before = raw.offset + raw.num_bytes, name
        if end > header.size:
            raise WeightsError(
                f"{header.file} ends after {header.size} bytes, and {name} at {end}: it was cut; "
                "get it again"
            )
        yield raw

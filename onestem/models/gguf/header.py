"""The header of a GGUF file (versions 2 and 3, little-endian).

`magic, version, number of tensors, number of fields`, then the fields (name, type, value), then a
line for each tensor (name, sizes with the innermost first, type, place), then its data at multiples
of `general.alignment`. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Nothing is believed before it is compared with the file's size, and lists stay in the file until
they are asked for: a header takes no more memory than it has bytes.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from onestem.errors import WeightsError
from onestem.files import check_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)

STRING, LIST, BOOL, FLOAT32 = 8, 9, 7, 6
# Type of a field -> how struct and numpy name it.
NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip

# More than any model has; a damaged number must not be walked for minutes.
MOST_FIELDS, MOST_TENSORS, MOST_STRINGS = 1 << 16, 1 << 20, 1 << 23
MOST_TEXT, MOST_WORD = 1 << 22, 1 << 16  # bytes of a text, and of a name or one text of a list
MOST_SIDES = 4
LEAST_ALIGNMENT, MOST_ALIGNMENT = 8, 1 << 20


@dataclass(frozen=True)
class List:
    """A list in the header: type of its elements, how many, and where the first one is."""

    kind: int
    size: int
    offset: int


@dataclass(frozen=True)
class Entry:
    """A tensor's line in the header.

    Attributes:
        shape: outermost first.
        kind: number of its type (`gguf.GGMLQuantizationType`).
        offset: of its first byte in the file.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """What a GGUF file says before its data.

    Attributes:
        size: bytes of the whole file.
        fields: values by name; numbers of 32 bits are the shortest decimals that round to them.
        tensors: by name.
    """

    file: Path
    size: int
    fields: dict[str, bool | int | float | str | List]
    tensors: dict[str, Entry]

    def strings(self, name: str) -> list[str]:
        """A list of texts. Raises `WeightsError` where it is none."""
        found = self._list(name, STRING, "texts")
        with _Reader(self.file) as read:
            read.at = found.offset
            return read.strings(found.size, name)

    def numbers(self, name: str) -> np.ndarray:
        """A list of numbers. Raises `WeightsError` where it is none."""
        found = self._list(name, None, "numbers")
        with _Reader(self.file) as read:
            read.at = found.offset
            dtype = np.dtype(NUMBERS[found.kind]).newbyteorder("<")
            return np.frombuffer(read.bytes(found.size * dtype.itemsize, name), dtype)

    def _list(self, name: str, kind: int | None, of: str) -> List:
        found = self.fields.get(name)
        if not isinstance(found, List) or (found.kind != kind if kind else found.kind == STRING):
            given = "missing" if found is None else "another value"
            raise WeightsError(f"{self.file}: {name} is {given}, expected a list of {of}")
        return found


def read_header(file: Path) -> Header:
    """The header of a file.

    Raises:
        WeightsError: it cannot be read, or is no header; names what is wrong in it.
    """
    try:
        check_regular(file, WeightsError, most_bytes=None)
        with _Reader(file) as read:
            return read.header()
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error.strerror}") from None


class _Reader:
    """Reads a header from its beginning to its end; `at` is the next byte."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.at = 0

    def __enter__(self) -> _Reader:
        with open(self.file, "rb") as opened:
            if opened.read(len(MAGIC)) != MAGIC:
                self.fail("begins with other bytes than GGUF: it is no GGUF file")
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._map)
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()

    def fail(self, what: str) -> NoReturn:
        raise WeightsError(f"{self.file} {what}")

    def bytes(self, count: int, what: str) -> bytes:
        """The next `count` bytes, which are `what`."""
        end = self.at + count
        if end > self.size:
            self.fail(
                f"ends after {self.size} bytes, in its header ({what}): it was cut, or is damaged; "
                "get it again"
            )
        found = self._map[self.at : end]
        self.at = end
        return found

    def number(self, kind: int, what: str) -> bool | int | float:
        code = NUMBERS[kind]
        raw = self.bytes(struct.calcsize(f"<{code}"), what)
        (value,) = struct.unpack(f"<{code}", raw)
        if kind == FLOAT32 and math.isfinite(value):
            value = float(str(np.float32(value)))  # 0.22, not 0.2199999988079071
        found: bool | int | float = value
        return found

    def count(self, what: str, most: int) -> int:
        found = int(self.number(10, what))
        if found > most:
            self.fail(f"is damaged: {what} is {found}, limit is {most}; get it again")
        return found

    def string(self, what: str, most: int) -> str:
        raw = self.bytes(self.count(f"the length of {what}", most), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"is damaged: {what} is no UTF-8; get it again")

    def value(self, name: str) -> bool | int | float | str | List:
        kind = int(self.number(4, name))
        if kind == STRING:
            return self.string(name, MOST_TEXT)
        if kind in NUMBERS:
            return self.number(kind, name)
        if kind != LIST:
            self.fail(f"is damaged: {name} is of type {kind}, which there is not; get it again")
        of = int(self.number(4, name))
        if of not in NUMBERS and of != STRING:
            self.fail(f"is damaged: {name} is a list of type {of}, which there is not")
        most = MOST_STRINGS if of == STRING else self.size
        found = List(of, self.count(f"the length of {name}", most), self.at)
        if of == STRING:
            self.skip_strings(found.size, name)
        else:
            self.bytes(0, name)
            end = self.at + found.size * struct.calcsize(f"<{NUMBERS[of]}")
            self.at = min(end, self.size + 1)
        return found

    def skip_strings(self, count: int, name: str) -> None:
        """Pass a list of texts. A vocabulary has hundreds of thousands: nothing is made of one."""
        at, size, length_of, data = self.at, self.size, struct.Struct("<Q").unpack_from, self._map
        for _ in range(count):
            if at + 8 > size:
                break
            at += 8 + length_of(data, at)[0]
        self.at = at
        self.bytes(0, name)

    def strings(self, count: int, name: str) -> list[str]:
        """A list of texts that was passed before."""
        at, length_of, found = self.at, struct.Struct("<Q").unpack_from, list[str]()
        for _ in range(count):
            start = at + 8
            at = start + length_of(self._map, at)[0]
            if at - start > MOST_WORD:
                self.fail(f"is damaged: {name}[{len(found)}] has more than {MOST_WORD} bytes")
            try:
                found.append(self._map[start:at].decode())
            except UnicodeDecodeError:
                self.fail(f"is damaged: {name}[{len(found)}] is no UTF-8; get it again")
        return found

    def header(self) -> Header:
        self.bytes(len(MAGIC), "magic")
        version = int(self.number(4, "version"))
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            self.fail(f"is GGUF of version {version}, expected {known}, little-endian: convert it")
        num_tensors = self.count("the number of tensors", MOST_TENSORS)
        fields: dict[str, bool | int | float | str | List] = {}
        for i in range(self.count("the number of fields", MOST_FIELDS)):
            name = self.string(f"the name of field {i}", MOST_WORD)
            if name in fields:
                self.fail(f"is damaged: it has {name} twice")
            fields[name] = self.value(name)
        lines = {}
        for i in range(num_tensors):
            name = self.string(f"the name of tensor {i}", MOST_WORD)
            if name in lines:
                self.fail(f"is damaged: it has {name} twice")
            lines[name] = self.entry(name)
        start = self.data_start(fields.get("general.alignment", 32))
        tensors = {
            name: Entry(one.shape, one.kind, start + one.offset) for name, one in lines.items()
        }
        return Header(self.file, self.size, fields, tensors)

    def entry(self, name: str) -> Entry:
        sides = int(self.number(4, name))
        if not 0 < sides <= MOST_SIDES:
            self.fail(f"is damaged: {name} has {sides} dimensions, expected 1 to {MOST_SIDES}")
        shape = tuple(int(self.number(10, name)) for _ in range(sides))[::-1]
        if not all(shape):
            self.fail(f"is damaged: {name} is {list(shape)}, without elements")
        return Entry(shape, int(self.number(4, name)), int(self.number(10, name)))

    def data_start(self, alignment: object) -> int:
        """Where the first tensor's data may begin."""
        if not isinstance(alignment, int) or not (
            LEAST_ALIGNMENT <= alignment <= MOST_ALIGNMENT and alignment & (alignment - 1) == 0
        ):
            self.fail(f"is damaged: general.alignment is {alignment!r}, expected a power of two")
        return -(-self.at // alignment) * alignment

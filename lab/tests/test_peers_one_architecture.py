"""Kernels of other architectures become zeros, and nothing else does."""

from __future__ import annotations

import struct

import pytest

from onestem_lab.peers.one_architecture import CUBIN, MAGIC, PTX, clear_others


def code(kind: int, architecture: int, letter: str) -> bytes:
    body = letter.encode() * 24
    return struct.pack("<HHIQ", kind, 0x101, 64, len(body)).ljust(28, b"\0") + (
        struct.pack("<I", architecture).ljust(36, b"\0") + body
    )


def part(*codes: bytes) -> bytes:
    return struct.pack("<IHHQ", MAGIC, 1, 16, sum(map(len, codes))) + b"".join(codes)


def library(*parts: bytes) -> bytearray:
    """An ELF file with a section of code, and one of other bytes that looks like it."""
    names = b"\0.nv_fatbin\0.text\0.names\0"
    bodies = [b"\0" * 8 + b"".join(parts), parts[0], names]
    heads, at = [bytes(64)], 64
    for body, name in zip(bodies, (b".nv_fatbin", b".text", b".names"), strict=True):
        place = names.index(name)
        heads.append(struct.pack("<IIQQQQIIQQ", place, 1, 0, 0, at, len(body), 0, 0, 0, 0))
        at += len(body)
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, at)
    struct.pack_into("<HHH", head, 0x3A, 64, len(heads), 3)
    return head + b"".join(bodies) + b"".join(heads)


def test_one_architecture_is_kept():
    with_native = part(code(CUBIN, 80, "a"), code(CUBIN, 90, "b"), code(PTX, 90, "c"))
    without = part(code(CUBIN, 80, "d"), code(PTX, 80, "e"), code(PTX, 100, "f"))
    data = library(with_native, without)
    before = bytes(data)
    assert clear_others(data, 90) == 48
    for letter, left in zip("abcdef", (False, True, False, False, True, False), strict=True):
        assert (letter.encode() * 24 in data[64 : 64 + 8 + len(with_native + without)]) == left
    at = 64 + 8 + len(with_native + without)
    assert data[at:] == before[at:]
    assert sum(a != b for a, b in zip(data, before, strict=True)) == 4 * 24


def test_a_part_that_ends_elsewhere_is_named():
    data = library(part(code(CUBIN, 80, "a")))
    struct.pack_into("<Q", data, 64 + 8 + 8, 100)
    with pytest.raises(ValueError, match="ends at"):
        clear_others(data, 90)

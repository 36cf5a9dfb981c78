"""A library of CUDA kernels with those of one architecture alone, for a machine that much cannot be
brought to.

    python -m onestem_lab.peers.one_architecture LIBRARY.so OUT.so [--architecture 90]

Machine code for other architectures becomes zeros, which any packer takes away: sizes and offsets
stay, and the driver loads what its device has. Where an architecture has none in a part, PTX for it
or for one before it is kept. So vLLM 0.24's wheel packs to 26 MB (`xz -9`) for an H100, without
what it does not load there: `third_party/deep_gemm`, `third_party/fmha_sm100`, `vllm-rs`,
`_flashmla*`, `_qutlass*` and `_vllm_fa2_C*`.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = 0xBA55ED50  # of a part, as nvcc writes them
PTX, CUBIN = 1, 2
SECTIONS = (".nv_fatbin", "__nv_relfatbin")
NOBITS = 8  # a section that has no bytes in the file


class Code(NamedTuple):
    """A kernel's code for one architecture: `kind`, and its bytes from start to end-1."""

    kind: int
    architecture: int
    start: int
    end: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--architecture", type=int, default=90)
    options = parser.parse_args()
    data = bytearray(options.library.read_bytes())
    kept = clear_others(data, options.architecture)
    options.out.write_bytes(data)
    print(f"{options.out}: {kept} of {len(data)} bytes are code for {options.architecture}")


def clear_others(data: bytearray, architecture: int) -> int:
    """Write zeros over the code of other architectures; the number of bytes of code that is kept.

    Raises:
        ValueError: a part does not end where its header says.
    """
    kept = 0
    for first, end in _sections(data):
        for part in _parts(data, first, end):
            native = any(one.kind == CUBIN and one.architecture == architecture for one in part)
            for kind, made_for, start, stop in part:
                runs = made_for == architecture if kind == CUBIN else made_for <= architecture
                if runs and (kind == CUBIN or not native):
                    kept += stop - start
                else:
                    data[start:stop] = bytes(stop - start)
    return kept


def _sections(data: bytearray) -> Iterator[tuple[int, int]]:
    """Where those of code begin and end in an ELF file of 64 bits."""
    at, count = struct.unpack_from("<Q", data, 0x28)[0], struct.unpack_from("<H", data, 0x3C)[0]
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, at + 64 * i) for i in range(count)]
    names = heads[struct.unpack_from("<H", data, 0x3E)[0]][4]
    for name, kind, _, _, first, size, *_ in heads:
        start = names + name
        if kind != NOBITS and data[start : data.index(0, start)].decode() in SECTIONS:
            yield first, first + size


def _parts(data: bytearray, at: int, end: int) -> Iterator[list[Code]]:
    while at < end:
        if struct.unpack_from("<I", data, at)[0] != MAGIC:
            at += 8
            continue
        head, size = struct.unpack_from("<HQ", data, at + 6)
        entry, stop, part = at + head, at + head + size, list[Code]()
        while entry < stop:
            kind, _, head, size = struct.unpack_from("<HHIQ", data, entry)
            made_for = struct.unpack_from("<I", data, entry + 28)[0]
            part.append(Code(kind, made_for, entry + head, entry + head + size))
            entry = part[-1].end
        if entry != stop:
            raise ValueError(f"the part at {at} ends at {entry}, expected {stop}")
        yield part
        at = stop


if __name__ == "__main__":
    main()

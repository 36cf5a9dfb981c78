"""Blocks of GGUF tensors as they are: codes, and numbers of groups.

Layouts are those of llama.cpp's `ggml-common.h`. `Groups.dense` has the bits of `gguf.quants`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from onestem.errors import WeightsError
from onestem.models.formats.held import Groups, Levels, OfGroups, Pieces
from onestem.models.gguf.file import BLOCKS, RawTensor
from onestem.models.gguf.values import DAMAGED, spans_of
from onestem.ops.experts import E2M1

Bytes = np.ndarray  # uint8

MULTIPLE = 32  # of a piece's rows, as products pack them


@dataclass(frozen=True)
class _Kind:
    """A type of blocks.

    Attributes:
        sizes: bytes of a block's parts.
        read: parts `[blocks, size]` -> codes `[blocks, columns]`, scales, minimums, each number
            `[blocks, groups]`, or in two levels (parts, super-block's).
        zero: of all groups; None: there are minimums or a table.
    """

    sizes: tuple[int, ...]
    read: Callable[..., tuple[Bytes, Any, Any]]
    zero: int | None = None
    table: tuple[int, ...] | None = None


def pieces_of(raw: RawTensor) -> Pieces:
    """A tensor's blocks, `[rows, columns]`. Pieces raise `WeightsError` where scales are not
    finite, or the file cannot be read."""
    parts = [(stop - at, partial(_unpacked, raw, at, stop)) for at, stop in spans_of(raw, MULTIPLE)]
    return Pieces(empty_groups(raw.kind, 1, raw.shape[-1]), tuple(parts))


def _unpacked(raw: RawTensor, first: int, stop: int) -> Groups:
    groups = groups_of_blocks(raw.kind, raw.blocks(first, stop))
    if not _is_finite(groups):
        raise WeightsError(f"{raw.file}: {raw.name} has scales that are not finite: {DAMAGED}")
    return groups


def groups_of_blocks(kind: str, rows: Bytes) -> Groups:
    """Rows of blocks, uint8 `[rows, row_bytes]`."""
    known, (bits, group) = _KINDS[kind], BLOCKS[kind]
    blocks = rows.reshape(-1, sum(known.sizes))
    parts = np.split(blocks, np.cumsum(known.sizes)[:-1], axis=1)
    codes, scales, minimums = known.read(*map(np.ascontiguousarray, parts))
    held = torch.from_numpy(codes).view(len(rows), -1)
    groups = (len(rows), held.shape[1] // group)
    zeros = None
    if known.zero is not None:
        zeros = torch.full(groups, known.zero, dtype=torch.int16)
    scaled = _numbers(scales, groups)
    least = None if minimums is None else _numbers(minimums, groups)
    return Groups(held, scaled, zeros, group, bits, None, least, known.table, kind)


def empty_groups(kind: str, out: int, size: int) -> Groups:
    """A weight of zeros, `[out, size]`; of whole blocks."""
    per_block = 256 if kind.endswith("_K") else 32
    row_bytes = -(-size // per_block) * sum(_KINDS[kind].sizes)
    return groups_of_blocks(kind, np.zeros((out, row_bytes), np.uint8))


def _numbers(found: Any, groups: tuple[int, int]) -> OfGroups:
    if isinstance(found, torch.Tensor):
        return found.view(groups)
    parts, supers = found
    held = torch.from_numpy(parts).view(groups)
    return Levels(held, supers.view(len(held), -1), parts.shape[1])


def _is_finite(weight: Groups) -> bool:
    most = 1 if weight.table is None else max(map(abs, weight.table))  # else of 16 bits, and small
    numbers = [one for one in (weight.scales, weight.minimums) if one is not None]
    held = [one.supers if isinstance(one, Levels) else one for one in numbers]
    return all(bool((one.float() * most).isfinite().all()) for one in held)


def _halves(x: Bytes) -> torch.Tensor:
    """float16 `[blocks, 1]`."""
    return torch.from_numpy(x).view(torch.float16)


def _nibbles(x: Bytes, run: int) -> Bytes:
    """Codes of 4 bits: of `run` bytes the low halves, then the high ones; of the next likewise."""
    runs = torch.from_numpy(x).view(len(x), -1, run)
    halves: Bytes = torch.stack((runs & 15, runs >> 4), dim=2).view(len(x), -1).numpy()
    return halves


def _fifth_bits(x: Bytes) -> Bytes:
    """Bit i of four bytes, at the place of code i's fifth."""
    return np.unpackbits(x, axis=1, bitorder="little") << 4


def _q4_0(scale: Bytes, codes: Bytes) -> tuple[Bytes, Any, Any]:
    return _nibbles(codes, 16), _halves(scale), None


def _q4_1(scale: Bytes, least: Bytes, codes: Bytes) -> tuple[Bytes, Any, Any]:
    return _nibbles(codes, 16), _halves(scale), _halves(least)


def _q5_0(scale: Bytes, fifth: Bytes, codes: Bytes) -> tuple[Bytes, Any, Any]:
    return _nibbles(codes, 16) | _fifth_bits(fifth), _halves(scale), None


def _q5_1(scale: Bytes, least: Bytes, fifth: Bytes, codes: Bytes) -> tuple[Bytes, Any, Any]:
    return _nibbles(codes, 16) | _fifth_bits(fifth), _halves(scale), _halves(least)


def _q8_0(scale: Bytes, codes: Bytes) -> tuple[Bytes, Any, Any]:
    return codes ^ 128, _halves(scale), None


def _k_numbers(scale: Bytes, least: Bytes, packed: Bytes) -> tuple[Any, Any]:
    """Scales and minimums of eight groups, each in two levels. Parts have 6 bits: of four groups in
    bytes 0 to 3 and 4 to 7; of the others the low nibbles in bytes 8 to 11, and the two bits above
    in the first eight bytes."""
    low, least_low, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=1)
    minimums = np.concatenate([least_low & 63, high >> 4 | least_low >> 2 & 48], axis=1)
    return (scales, _halves(scale)), (minimums, -_halves(least))


def _q4_k(scale: Bytes, least: Bytes, packed: Bytes, codes: Bytes) -> tuple[Bytes, Any, Any]:
    return _nibbles(codes, 32), *_k_numbers(scale, least, packed)


def _q5_k(
    scale: Bytes, least: Bytes, packed: Bytes, fifth: Bytes, codes: Bytes
) -> tuple[Bytes, Any, Any]:
    bits = fifth[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    whole = _nibbles(codes, 32) | bits.reshape(len(codes), -1) << 4
    return whole, *_k_numbers(scale, least, packed)


def _q6_k(low: Bytes, high: Bytes, parts: Bytes, scale: Bytes) -> tuple[Bytes, Any, Any]:
    quads = high.reshape(len(high), 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    codes = _nibbles(low, 64) | quads.reshape(len(high), -1) << 4
    return codes, (parts.view(np.int8), _halves(scale)), None


def _mxfp4(power: Bytes, codes: Bytes) -> tuple[Bytes, Any, Any]:
    # Half of 2 ** (power - 127), since the table is doubled; bfloat16 has all of them.
    scales = np.ldexp(np.float32(1), power.astype(np.int32) - 128)
    return _nibbles(codes, 16), torch.from_numpy(scales).bfloat16(), None


_KINDS: dict[str, _Kind] = {
    "Q4_0": _Kind((2, 16), _q4_0, zero=8),
    "Q4_1": _Kind((2, 2, 16), _q4_1),
    "Q5_0": _Kind((2, 4, 16), _q5_0, zero=16),
    "Q5_1": _Kind((2, 2, 4, 16), _q5_1),
    "Q8_0": _Kind((2, 32), _q8_0, zero=128),
    "Q4_K": _Kind((2, 2, 12, 128), _q4_k),
    "Q5_K": _Kind((2, 2, 12, 32, 128), _q5_k),
    "Q6_K": _Kind((128, 64, 16, 2), _q6_k, zero=32),
    "MXFP4": _Kind((1, 16), _mxfp4, table=E2M1),
}

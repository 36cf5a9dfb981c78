"""Blocks of GGUF files as groups: their numbers, rows in another order, parts for ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from onestem.errors import WeightsError
from onestem.models.cuts import Cut
from onestem.models.formats.held import Groups, Levels, Pieces, joined
from onestem.models.formats.products import packed_groups
from onestem.models.gguf import values
from onestem.models.gguf.blocks import pieces_of
from onestem.models.gguf.file import BLOCKS, RawTensor
from onestem.models.gguf_tensors import GgufTensor, by_halves
from tests.models.as_gguf import HALVES

ROWS, COLUMNS = 12, 512

EXTREMES = [0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, 1.0]

every_kind = pytest.mark.parametrize("kind", BLOCKS)


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., tuple[RawTensor, Tensor]]:
    def make(kind: str, seed: int = 0, rows: int = ROWS) -> tuple[RawTensor, Tensor]:
        """Random blocks in a file, and the numbers that they are."""
        known = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[known]
        random = np.random.default_rng(seed)
        blocks = random.integers(0, 256, (rows * COLUMNS // block, size), np.uint8)
        for at in HALVES[kind]:
            scales = random.standard_normal(len(blocks)).astype(np.float16)
            scales[: len(EXTREMES)] = EXTREMES
            blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
        if kind == "MXFP4":
            blocks[:, 0] = random.permutation(len(blocks)) % 250  # 0 and 1: denormal
        (tmp_path / kind).write_bytes(b"before" + blocks.tobytes())
        raw = RawTensor("a", (rows, COLUMNS), kind, COLUMNS // block * size, tmp_path / kind, 6)
        truth = gguf.quants.dequantize(blocks, known)
        return raw, torch.from_numpy(truth).reshape(rows, COLUMNS)

    return make


@every_kind
@pytest.mark.parametrize("rows", [1, 5, ROWS])
def test_groups_are_the_numbers_of_their_blocks(stored, monkeypatch, kind, rows):
    """To the last bit, whichever rows a thread has."""
    monkeypatch.setattr(values, "CHUNK", rows * COLUMNS)
    raw, truth = stored(kind)
    weight = pieces_of(raw).whole()
    assert torch.equal(weight.dense(), truth)
    assert int(weight.codes.max()) < 1 << weight.bits
    if kind == "Q6_K":
        assert isinstance(weight.scales, Levels)
        assert int(weight.scales.parts.min()) < 0


@every_kind
@pytest.mark.parametrize("rows", [64, 80])
def test_pieces_are_packed_as_the_whole(stored, monkeypatch, kind, rows):
    """Two matrices behind each other, the first of whole pairs of blocks or not."""
    monkeypatch.setattr(values, "CHUNK", 1)
    pieces = joined([pieces_of(stored(kind, rows=rows)[0])] * 2)
    assert isinstance(pieces, Pieces)
    assert len(pieces.parts) > 2
    packed, whole = packed_groups(pieces), packed_groups(pieces.whole())
    assert packed.out_features == pieces.out_features == 2 * rows
    for one, other in zip(packed.tensors(), whole.tensors(), strict=True):
        assert torch.equal(one, other)


@every_kind
def test_scales_that_are_not_finite(stored, kind):
    raw, _ = stored(kind)
    data = bytearray(raw.file.read_bytes())
    at = (6 if kind == "MXFP4" else 7) + (*HALVES[kind], 0)[0]
    data[at] = 0xFF  # of a float16 that is NaN, or a power of 255
    raw.file.write_bytes(data)
    with pytest.raises(WeightsError, match="a has scales that are not finite: the file is damaged"):
        pieces_of(raw).whole()


def _tensor(raw: RawTensor, *, transposed: bool = False, heads: int = 0) -> GgufTensor:
    shape = (COLUMNS, ROWS) if transposed else (ROWS, COLUMNS)
    arrange = (lambda parts: by_halves(heads, parts)) if heads else (lambda parts: parts[0])
    return GgufTensor(shape, (raw,), arrange, transposed)


@every_kind
@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_and_orders(stored, kind, heads, transposed):
    """As the part of the numbers: of rows and of columns, within a super-block and a group too, and
    beyond the end."""
    raw, _ = stored(kind)
    one = _tensor(raw, transposed=transposed, heads=heads)
    rows, columns = int(transposed), int(not transposed)
    cuts = [None, *(Cut(rows, spans) for spans in (((0, 3),), ((1, 2), (8, 12)), ((9, 15),)))]
    cuts += [Cut(columns, (span,)) for span in ((0, 256), (256, 512), (32, 480), (5, 37), (3, 4))]
    for cut in cuts:
        truth = one.read(cut, torch.float32)
        weight = one.groups(cut)
        assert torch.equal(weight.dense(), truth.mT if transposed else truth), cut


def test_types_that_differ_are_not_joined(stored):
    weights = {kind: pieces_of(stored(kind)[0]).whole() for kind in BLOCKS}
    for kind, weight in weights.items():
        for other, another in weights.items():
            whole = joined([weight, another])
            if kind == other:
                assert isinstance(whole, Groups)
                assert torch.equal(whole.dense(), torch.cat([weight.dense(), another.dense()]))
            else:
                assert whole is None

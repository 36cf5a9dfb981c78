"""Weights that are cut from slabs in huge pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from onestem.models.formats.products import CpuProduct
from onestem.models.weights import load_decoder
from onestem.ops.cpu import is_built
from onestem.ops.cpu.huge import ALIGNED, SLAB, in_huge_pages, room_for, settled

POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HAS_HUGE = POLICY.exists() and "[madvise]" in POLICY.read_text()


def huge_bytes(address: int) -> int:
    """Of the mapping that has the address."""
    found = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            there = int(match[1], 16) <= address < int(match[2], 16)
        elif there and line.startswith("AnonHugePages:"):
            found = int(line.split()[1]) << 10
    return found


def test_weights_are_side_by_side():
    one, other = torch.randn(7, 30), torch.randint(0, 99, (1000, 3), dtype=torch.int8)
    with in_huge_pages():
        held = [settled(one), settled(other), settled(other.view(torch.uint8))]
        large = room_for((SLAB + 5,), torch.uint8)
        after = settled(one)
    assert torch.equal(held[0], one)
    assert torch.equal(held[1], other)
    assert {tensor.untyped_storage().data_ptr() for tensor in held} == {
        held[0].untyped_storage().data_ptr()
    }
    first = held[0].data_ptr()
    assert [tensor.data_ptr() - first for tensor in held] == [0, 14 * ALIGNED, 61 * ALIGNED]
    assert large.untyped_storage().nbytes() == SLAB + 5
    assert after.untyped_storage().data_ptr() not in (first, large.data_ptr())
    assert settled(one) is one


@pytest.mark.skipif(not HAS_HUGE, reason="the kernel has no huge pages for programs")
def test_the_kernel_is_asked():
    with in_huge_pages():
        held = room_for((SLAB // 2,), torch.uint8).fill_(1)
        assert huge_bytes(held.data_ptr() + SLAB // 4) >= SLAB // 4


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_models_weights_are_in_one_slab(tiny, form):
    decoder = load_decoder(tiny("llama"), dtype=torch.bfloat16, device="cpu", quantization=form)
    products = [one for layer in decoder.layers for one in layer.linears]
    held = [one.packed.codes for one in products if isinstance(one, CpuProduct)]
    assert len(held) == len(products) > 4
    assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == 1
    assert decoder.weight_bytes < SLAB

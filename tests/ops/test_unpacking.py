"""The PTX that unpacks codes, run here one instruction after the other on every word."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from onestem.ops.triton.tiled_experts import _WIDEN
from onestem.ops.triton.tiled_groups import (
    BYTES_BF16,
    BYTES_FP16,
    E2M1_BF16,
    E2M1_FP16,
    E4M3_BF16,
    E4M3_FP16,
    UNPACK_BF16,
    UNPACK_FP16,
)

WORDS = torch.arange(1 << 16).to(torch.int16)
KINDS = {"bf16": torch.bfloat16, "f16": torch.float16}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def pairs(values: Tensor) -> np.ndarray:
    """16 bits each -> uint32, the first of two in the lower half."""
    return values.contiguous().view(torch.int16).numpy().view(np.uint32)


def halves(registers: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(registers, order="C").view(np.int16)).view(dtype)


def run(assembly: str, *arguments: np.ndarray) -> np.ndarray:
    """`$0` of arguments `$1`, `$2`, ..."""
    registers = {f"${i}": one for i, one in enumerate(arguments, 1)}

    def read(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.uint32(int(name, 0))

    for line in assembly.strip("{ }").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        into, *names = (name.strip() for name in rest.split(","))
        kind, *detail = operation.split(".")
        values = [read(name) for name in names]
        if kind == "mov":
            result = values[0]
        elif kind in ("shr", "shl"):
            result = values[0] >> values[1] if kind == "shr" else values[0] << values[1]
        elif kind == "and":
            result = values[0] & values[1]
        elif kind == "prmt":
            both = (values[1].astype(np.uint64) << np.uint64(32)) | values[0]
            places = [int(names[2], 0) >> (4 * i) & 15 for i in range(4)]
            chosen = [
                (both >> np.uint64(8 * at) & np.uint64(255)) << np.uint64(8 * i)
                for i, at in enumerate(places)
            ]
            result = np.bitwise_or.reduce(chosen)
        elif kind == "add":
            assert detail[0] == "rn"
            dtype = torch.float32 if detail[1] == "f32" else torch.float16
            a, b = (torch.from_numpy(one.view(np.int32)).view(dtype) for one in values)
            assert torch.equal((a + b).double(), a.double() + b.double())  # nothing is rounded
            result = (a + b).view(torch.int32).numpy().view(np.uint32)
        elif kind == "lop3":
            assert values[3] == (0xF0 & 0xCC) | 0xAA
            result = values[0] & values[1] | values[2]
        else:
            assert kind == "fma"
            assert detail[0] == "rn"
            dtype = KINDS[detail[1].removesuffix("x2")]
            a, b, c = (halves(np.broadcast_to(one, len(WORDS) // 2), dtype) for one in values)
            exact = a.double() * b.double() + c.double()
            assert torch.equal(exact.to(dtype).double(), exact)  # nothing is rounded
            result = pairs(exact.to(dtype))
        registers[into] = np.asarray(result, np.uint32)
    return registers["$0"]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(
    ("assembly", "base", "dtype"),
    [(UNPACK_BF16, 128, torch.bfloat16), (UNPACK_FP16, 1024, torch.float16)],
)
def test_four_bits_less_a_zero_point(
    assembly: object, base: int, dtype: torch.dtype, place: int
) -> None:
    codes = (WORDS.int() >> (4 * place)) & 15
    for zero in (0, 8, 16):
        less = torch.full_like(codes, -base - zero).to(dtype)
        got = run(assembly.value[place], pairs(WORDS), pairs(less))  # type: ignore[attr-defined]
        assert torch.equal(halves(got, dtype).int(), codes - zero)


@pytest.mark.parametrize("place", range(2))
@pytest.mark.parametrize("zero", [0, 16, 128, 256])
def test_eight_bits_less_a_zero_point(zero: int, place: int) -> None:
    codes = (WORDS.int() >> (8 * place)) & 255
    less = np.full(len(WORDS) // 2, -(2.0**23) - zero, np.float32).view(np.uint32)
    got = run(BYTES_BF16.value[place], pairs(WORDS), less, less)
    assert torch.equal(halves(got, torch.bfloat16).double(), (codes - zero).bfloat16().double())
    own = torch.full_like(codes, -1024 - zero).half()
    got = run(BYTES_FP16.value[place], pairs(WORDS), pairs(own))
    assert torch.equal(halves(got, torch.float16).int(), codes - zero)


@pytest.mark.parametrize("place", range(2))
@pytest.mark.parametrize(
    ("assembly", "dtype"), [(E4M3_BF16, torch.bfloat16), (E4M3_FP16, torch.float16)]
)
def test_float8(assembly: object, dtype: torch.dtype, place: int) -> None:
    codes = ((WORDS.int() >> (8 * place)) & 255).to(torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    got = halves(run(assembly.value[place], pairs(WORDS)), dtype)  # type: ignore[attr-defined]
    known = ~values.isnan()
    assert torch.equal(got.float()[known], values[known])
    assert torch.equal(got.signbit(), codes > 127)  # of zeros too


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(
    ("assembly", "dtype"), [(E2M1_BF16, torch.bfloat16), (E2M1_FP16, torch.float16)]
)
def test_e2m1_doubled(assembly: object, dtype: torch.dtype, place: int) -> None:
    codes = (WORDS.int() >> (4 * place)) & 15
    values = 2 * E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    got = halves(run(assembly.value[place], pairs(WORDS)), dtype)  # type: ignore[attr-defined]
    assert torch.equal(got.float(), values)


@pytest.mark.parametrize("place", range(4))
def test_e2m1_times_a_power_of_two(place: int) -> None:
    codes = (WORDS.int() >> (4 * place)) & 15
    values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    for power in (0, 1, 64, 127, 128):
        scale = torch.full_like(WORDS, (power + 126) << 7)
        got = halves(run(_WIDEN.value[place], pairs(WORDS), pairs(scale)), torch.bfloat16)
        want = torch.ldexp(values.double(), torch.tensor(power - 127))
        assert torch.equal(got.double(), want)
        assert torch.equal(got.signbit(), codes > 7)  # of zeros too

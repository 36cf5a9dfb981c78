"""How formats store a linear layer: names, shapes and dtypes of its tensors, and what they mean.

| storage | weight | from |
|---|---|---|
| `float8` | `weight` (e4m3) times `weight_scale` or `weight_scale_inv`, per tensor, row or block | compressed-tensors, models' authors |
| `int8` | `weight` times `weight_scale`, per tensor, row or group | compressed-tensors |
| `packed` | `(weight_packed - weight_zero_point) * weight_scale`; `weight_packed` int32 `[out, in * bits / 32]`, lowest bits first, codes and zero points shifted by half their range; zero points packed along rows | compressed-tensors' pack-quantized |
| `gptq` | `(qweight - (qzeros + 1)) * scales`, `g_idx` names each input's group; `qweight` int32 `[in * bits / 32, out]`, `qzeros` `[groups, out * bits / 32]`; `gptq_v2` stores zero points as they are | GPTQ (arXiv 2210.17323), as AutoGPTQ and GPTQModel write it |
| `awq` | `(qweight - qzeros) * scales`; int32 `[in, out / 8]` and `[groups, out / 8]`, eight columns in the order 0, 2, 4, 6, 1, 3, 5, 7 | AWQ (arXiv 2306.00978), its gemm version |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onestem.errors import WeightsError
from onestem.models.formats.held import Channels, Groups, Weight
from onestem.models.quantization import Scheme

__all__ = ["Expected", "main_tensor", "stored_tensors", "stored_weight"]

# Of tensors that are not quantised, by safetensors' names.
FLOATS = ("BF16", "F16", "F32", "F64")
SCALES = (*FLOATS, "F8_E8M0")

# Places of eight columns in an int32 of AWQ, lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Expected:
    """A tensor of a checkpoint: its shape (of scales any with as many numbers: None is checked when
    it is read), and dtypes that it may have, by safetensors' names."""

    shape: Shape | None
    dtypes: tuple[str, ...] = FLOATS
    optional: bool = False


def main_tensor(scheme: Scheme) -> str:
    """The tensor that only a quantised module has; a `weight` is told by its dtype."""
    return {"packed": "weight_packed", "gptq": "qweight", "awq": "qweight"}.get(
        scheme.storage, "weight"
    )


def stored_tensors(scheme: Scheme, out: int, size: int) -> dict[str, Expected]:
    """Of a module `[out, size]`: name behind the module's -> what is expected there."""
    per_word = 32 // scheme.bits
    groups = _parts(size, scheme.columns)
    words = ("I32", "U32")
    if scheme.storage == "packed":
        held = {
            "weight_packed": Expected((out, _parts(size, per_word)), words),
            "weight_scale": Expected((_parts(out, scheme.rows), groups), SCALES),
            "weight_shape": Expected((2,), ("I64", "I32"), optional=True),
            "weight_g_idx": Expected((size,), ("I32", "I64"), optional=True),
        }
        if not scheme.symmetric:
            held["weight_zero_point"] = Expected((_parts(out, per_word), groups), words)
        return held
    if scheme.storage == "gptq":
        return {
            "qweight": Expected((_parts(size, per_word), out), words),
            "qzeros": Expected((groups, _parts(out, per_word)), words),
            "scales": Expected((groups, out)),
            "g_idx": Expected((size,), ("I32", "I64"), optional=True),
        }
    if scheme.storage == "awq":
        return {
            "qweight": Expected((size, _parts(out, per_word)), words),
            "qzeros": Expected((groups, _parts(out, per_word)), words),
            "scales": Expected((groups, out)),
        }
    code = ("F8_E4M3",) if scheme.storage == "float8" else ("I8",)
    return {
        "weight": Expected((out, size), code),
        "weight_scale": Expected(None, SCALES, optional=True),
        "weight_scale_inv": Expected(None, SCALES, optional=True),
        # Of calibrated activations: rows are rounded by their own maximum instead.
        "input_scale": Expected(None, SCALES, optional=True),
        "weight_zero_point": Expected(None, ("I8", "F8_E4M3", *FLOATS), optional=True),
    }


def stored_weight(
    scheme: Scheme, module: str, get: Callable[[str], Tensor | None], out: int, size: int
) -> Weight:
    """The weight of a module from its tensors.

    Args:
        get: gives a tensor as it is stored, by its name behind the module's; None: it is not there.

    Raises:
        WeightsError: names the module and what cannot be.
    """
    return _Reader(scheme, module, get, out, size).weight()


class _Reader:
    def __init__(
        self,
        scheme: Scheme,
        module: str,
        get: Callable[[str], Tensor | None],
        out: int,
        size: int,
    ) -> None:
        self.scheme, self.module, self.get = scheme, module, get
        self.out, self.size = out, size

    def weight(self) -> Weight:
        if self.scheme.storage == "packed":
            return self.packed()
        if self.scheme.storage == "gptq":
            return self.gptq()
        if self.scheme.storage == "awq":
            return self.awq()
        return self.eight_bits()

    def needed(self, name: str) -> Tensor:
        tensor = self.get(name)
        if tensor is None:
            raise WeightsError(f"{self.module} lacks {name}")
        return tensor

    def eight_bits(self) -> Weight:
        zero = self.get("weight_zero_point")
        if zero is not None and zero.float().any():
            raise WeightsError(f"{self.module}.weight_zero_point is not 0, expected symmetric")
        codes = self.needed("weight")
        scales = self.get("weight_scale_inv")
        scales = self.needed("weight_scale") if scales is None else scales
        scales = self.by_row(scales)
        if scales.shape[1] == 1 and self.scheme.rounds_rows:
            return Channels(codes, scales[:, 0].contiguous())
        if codes.dtype != torch.int8:
            return Groups(codes, scales, None, self.group)
        shifted = (codes.short() + 128).to(torch.uint8)
        return Groups(shifted, scales, self.half(scales), self.group)

    def packed(self) -> Groups:
        bits = self.scheme.bits
        codes = _unpacked(self.needed("weight_packed"), bits)[:, : self.size]
        scales = self.by_row(self.needed("weight_scale"))
        zeros = self.half(scales)
        if not self.scheme.symmetric:
            stored = self.needed("weight_zero_point")
            zeros = _unpacked(stored.t(), bits)[:, : self.out].t().short().contiguous()
        return self.reordered(codes, scales, zeros, self.get("weight_g_idx"))

    def gptq(self) -> Groups:
        bits = self.scheme.bits
        codes = _unpacked(self.needed("qweight").t(), bits)[:, : self.size]
        zeros = _unpacked(self.needed("qzeros"), bits)[:, : self.out].t()
        zeros = (zeros.short() + self.scheme.zero_offset).contiguous()
        scales = self.by_row(self.needed("scales").t())
        return self.reordered(codes, scales, zeros, self.get("g_idx"))

    def awq(self) -> Groups:
        codes = _in_awq_order(_unpacked(self.needed("qweight"), 4)).t().contiguous()
        zeros = _in_awq_order(_unpacked(self.needed("qzeros"), 4)).t().short().contiguous()
        scales = self.by_row(self.needed("scales").t())
        return Groups(codes, scales, zeros, self.group, 4)

    @property
    def group(self) -> int:
        return self.scheme.columns or self.size

    def half(self, scales: Tensor) -> Tensor:
        return torch.full_like(scales, 1 << (self.scheme.bits - 1), dtype=torch.int16)

    def by_row(self, scales: Tensor) -> Tensor:
        """float32 `[out, groups]` of scales per tensor, row, group or block."""
        shape = (_parts(self.out, self.scheme.rows), _parts(self.size, self.scheme.columns))
        if scales.numel() != shape[0] * shape[1]:
            raise WeightsError(
                f"scales of {self.module} are {list(scales.shape)}, expected {list(shape)}"
            )
        by_part = scales.float().reshape(shape)
        rows = by_part.repeat_interleave(self.scheme.rows or self.out, dim=0)
        return rows[: self.out].contiguous()

    def reordered(
        self, codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor | None
    ) -> Groups:
        """With the columns of each group side by side, where they stand otherwise ("act-order")."""
        group, bits = self.group, self.scheme.bits
        places = torch.arange(self.size, device=codes.device) // group
        if groups is None or torch.equal(groups.long(), places):
            return Groups(codes.contiguous(), scales, zeros, group, bits)
        order = groups.long().argsort(stable=True)
        if not torch.equal(groups.long()[order], places):
            raise WeightsError(f"{self.module}: groups of inputs are not of {group} each")
        return Groups(codes[:, order].contiguous(), scales, zeros, group, bits, order)


def _parts(size: int, part: int | None) -> int:
    return 1 if part is None else -(-size // part)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 `[n, m]` -> uint8 `[n, m * 32 / bits]`, lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    codes = words.to(torch.int32)[..., None] >> shifts & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(1)


def _in_awq_order(codes: Tensor) -> Tensor:
    """`[n, columns]` as they are unpacked -> in the order of columns."""
    eights = codes.unflatten(1, (-1, 8))
    return (
        torch.empty_like(eights)
        .index_copy_(2, torch.tensor(AWQ_ORDER, device=codes.device), eights)
        .flatten(1)
    )

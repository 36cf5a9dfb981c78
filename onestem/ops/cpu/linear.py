"""Products of rows with weights of 8 and 4 bits in C++ (`csrc/linear.h` has the layout)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.errors import ConfigError
from onestem.ops.cpu.extension import DTYPES, checked_isa, native

__all__ = ["CpuCodes"]

BLOCK, PAIR = 16, 32  # outputs
CHUNK = {8: 64, 4: 128}  # inputs

# Maximum inputs whose products fit in sums of 32 bits.
MOST_INPUTS = 1 << 16

# With 4 bits, columns that share a scale; larger groups are cut.
GROUPS = (128, 64, 32)


@dataclass(frozen=True, eq=False)
class CpuCodes:
    """A weight of integers, as the C++ products take it.

    With 8 bits, each row of the input is rounded to int8 by its own maximum, and sums are exact.
    With 4 bits it depends on the instruction set. AMX multiplies bfloat16 rows as they are, and
    many of them with the weight's values in bfloat16. AVX-512 with VNNI rounds rows of 16 bits to
    int8 by the maximum of each group, as AMX does those of float16. All else keeps 16 bits.

    Attributes:
        codes: uint8, `[out / 16][chunk][16][64]`.
        scales: float32 `[out]` (8 bits), `[out / 16][groups][16]`.
        zeros: uint8, shaped as scales; None: half of the range.
        bits, group: bits of a code, and columns that share a scale (8 bits: all).
        out_features, in_features: of the weight.
        isa: instruction set; None: the one in use.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    out_features: int
    in_features: int
    isa: str | None = None

    @staticmethod
    def takes8(size: int) -> bool:
        """Whether sums over `size` inputs are exact."""
        return size <= MOST_INPUTS

    @staticmethod
    def takes4(size: int, group: int) -> bool:
        """Whether there are products for groups of `group` of `size` columns."""
        return size % group == group % GROUPS[-1] == 0

    @staticmethod
    def of8(codes: Tensor, scales: Tensor, isa: str | None = None) -> CpuCodes:
        """A weight of 8 bits, from codes int8 `[out, in]` and scales float32 `[out]`."""
        out, size = codes.shape
        shifted = codes.view(torch.uint8) ^ 128
        packed = _in_blocks(_padded(shifted, CHUNK[8]), CHUNK[8])
        return CpuCodes(packed, _padded_rows(scales.float()), None, 8, 0, out, size, isa)

    @staticmethod
    def of4(
        codes: Tensor, scales: Tensor, zeros: Tensor, group: int, isa: str | None = None
    ) -> CpuCodes:
        """A weight of 4 bits, from codes uint8 below 16 `[out, in]`, scales float32 and zeros int16
        from 0 to 255, both `[out, in / group]`."""
        out, size = codes.shape
        cut = next(one for one in GROUPS if group % one == 0)
        # 32 words of a chunk hold its four times 32 inputs.
        words = _padded(codes, CHUNK[4]).unflatten(1, (-1, 4, 32)).short()
        words = words[:, :, 0] | words[:, :, 1] << 4 | words[:, :, 2] << 8 | words[:, :, 3] << 12
        packed = _in_blocks(words.flatten(1).view(torch.uint8), 64)
        scales, zeros = (
            _of_groups(one.repeat_interleave(group // cut, dim=1), CHUNK[4] // cut)
            for one in (scales.float(), zeros)
        )
        same = bool((zeros == 8).logical_or_(scales == 0).all())
        held = None if same else zeros.to(torch.uint8)
        return CpuCodes(packed, scales, held, 4, cut, out, size, isa)

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x `[n, in]` times the transposed weight, plus the bias: `[n, out]`.

        Args:
            bias: float32 `[out]`.
            out: tensor for the result, in any of `DTYPES`; default: a new one of x's dtype.
        """
        x = x.contiguous()
        here = x.is_cpu and x.dtype in DTYPES
        if not here or x.dim() != 2 or x.shape[1] != self.in_features:
            raise ConfigError(
                f"got {x.dtype} {list(x.shape)} on {x.device}, expected rows of "
                f"{self.in_features} in {', '.join(map(str, DTYPES))} on the CPU"
            )
        rows, chunks = x.shape[0], self.codes.shape
        y = x.new_empty(rows, self.out_features) if out is None else out
        if out is not None and (
            not (out.is_cpu and out.is_contiguous() and out.dtype in DTYPES)
            or out.shape != (rows, self.out_features)
        ):
            raise ConfigError(
                f"got out {out.dtype} {list(out.shape)} on {out.device}, expected "
                f"[{rows}, {self.out_features}], contiguous, on the CPU"
            )
        native().multiply_codes(
            checked_isa(self.isa),
            (DTYPES[x.dtype], DTYPES[y.dtype]),
            x.data_ptr(),
            y.data_ptr(),
            rows,
            self.in_features,
            self.out_features,
            self.codes.data_ptr(),
            self.scales.data_ptr(),
            0 if self.zeros is None else self.zeros.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            self.bits,
            self.group,
            chunks[0] // 2,
            chunks[1],
            torch.get_num_threads(),
        )
        return y

    def tensors(self) -> list[Tensor]:
        """All tensors held, for counting bytes."""
        return [self.codes, self.scales, *([] if self.zeros is None else [self.zeros])]


def _padded(codes: Tensor, chunk: int) -> Tensor:
    """Codes padded to whole blocks of rows and chunks of columns."""
    out, size = codes.shape
    return F.pad(codes, (0, -size % chunk, 0, -out % PAIR))


def _padded_rows(values: Tensor) -> Tensor:
    return F.pad(values, (0, -len(values) % PAIR)).contiguous()


def _in_blocks(codes: Tensor, chunk: int) -> Tensor:
    """`[out, bytes]` -> `[out / 16, chunks, 16, chunk]`."""
    return codes.unflatten(1, (-1, chunk)).unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()


def _of_groups(values: Tensor, step: int) -> Tensor:
    """`[out, groups]` -> `[out / 16, groups, 16]`, whole chunks; 0 where there is no group."""
    out, groups = values.shape
    padded = F.pad(values, (0, -groups % step, 0, -out % PAIR))
    return padded.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()

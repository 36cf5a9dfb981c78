"""Tables and heads of whole numbers on a CPU: embeddings that are looked up, and logits."""

from __future__ import annotations

from torch import Tensor

from onestem.models.formats.held import Channels, Groups, Pieces, rounded_weight
from onestem.models.formats.products import CpuProduct, Target, packed_groups
from onestem.models.linear import Head, Layout, LogitsMemory
from onestem.ops.cpu import DTYPES, CpuCodes, is_built
from onestem.ops.cpu.huge import settled


class PackedTable:
    """A table `[rows, width]` that stays in groups; rows that are looked up are de-quantised.

    Attributes:
        packed: as the product of a tied head takes it.
        dtype: of the rows that it gives.
    """

    def __init__(self, weight: Groups | Pieces, target: Target) -> None:
        self.packed = packed_groups(weight)
        self.dtype, self.device = target.dtype, target.device

    @staticmethod
    def takes(weight: Groups | Pieces, target: Target) -> bool:
        """Whether this class supports a weight."""
        like = weight.like if isinstance(weight, Pieces) else weight
        return like.order is None and CpuProduct.takes(like, target)

    def __len__(self) -> int:
        return self.packed.out_features

    def rows(self, ids: Tensor) -> Tensor:
        """`[n, width]`: the rows `ids` (int64 `[n]`)."""
        return self.packed.rows(ids).to(self.dtype)

    def tensors(self) -> list[Tensor]:
        """See `held_tensors`."""
        return self.packed.tensors()


class PackedHead(Head):
    """Logits on a CPU, of whole numbers."""

    deterministic = False

    def __init__(self, codes: CpuCodes, layout: Layout, bias: Tensor | None = None) -> None:
        """codes `[vocab_size, hidden_size]`, bias `[vocab_size]`; layout: of the other weights."""
        self.layout, self.bias = layout, bias
        self.weight = self.packed = None
        self.codes = codes
        self.memory = LogitsMemory()

    def _product(self, x: Tensor) -> Tensor:
        out = self.memory.empty(x.shape[0], self.codes.out_features)
        return self.codes.product(x, None, out)


def rounded_head(weight: Tensor, layout: Layout, bias: Tensor | None = None) -> PackedHead:
    """A head of a weight `[vocab_size, hidden_size]`, rounded to int8 per channel."""
    held = rounded_weight(weight, "int8")
    assert isinstance(held, Channels)
    return PackedHead(CpuCodes.of8(held.codes, held.scales).changed(settled), layout, bias)


def takes_rounded_head(size: int, target: Target) -> bool:
    """Whether `rounded_head` supports a head of `size` inputs."""
    here = target.device.type == "cpu" and target.dtype in DTYPES and is_built()
    return here and CpuCodes.takes8(size)

"""Where a checkpoint's tensors are in a decoder, so that they can be rewritten in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from onestem.models.linear import Head, Linear
from onestem.models.tensors import TensorSpec

# New values: a tensor's, in a dtype or else the decoder's; None: it is left unchanged.
Given = Callable[[TensorSpec, torch.dtype | None], Tensor | None]


@dataclass(frozen=True, eq=False)
class TensorPlace:
    """A tensor of its own.

    Attributes:
        as_dtype: dtype that it is read in; None: the decoder's.
        change: turns what is read into what the decoder holds.
    """

    spec: TensorSpec
    tensor: Tensor
    as_dtype: torch.dtype | None
    change: Callable[[Tensor], Tensor]

    @property
    def names(self) -> Sequence[str]:
        """Its name in a checkpoint."""
        return (self.spec.name,)

    def write(self, given: Given) -> None:
        """Write the tensor, if it is given."""
        values = given(self.spec, self.as_dtype)
        if values is not None:
            self.tensor.copy_(self.change(values))


@dataclass(frozen=True, eq=False)
class ProductPlace:
    """Projections of the same input, fused into one product.

    Attributes:
        weights: of each. A product that has a bias holds theirs too.
        counts: rows of each; (): there is one weight.
        order: the row of the joined weights at each place; None: in their order.
    """

    product: Linear | Head
    weights: tuple[TensorSpec, ...]
    counts: tuple[int, ...] = ()
    order: list[int] | None = None

    @property
    def names(self) -> Sequence[str]:
        """Names of weights and biases in a checkpoint."""
        return [one.name for one in (*self.weights, *map(self._bias, self.weights)) if one]

    def _bias(self, weight: TensorSpec) -> TensorSpec | None:
        # A head's bias has a place of its own: it is added in float32, after the product.
        return weight.bias if isinstance(self.product, Linear) else None

    def write(self, given: Given) -> None:
        """Write those that are given, and pack the weight again."""
        with self.product.rewriting() as weight:
            for spec, rows in self._rows(weight):
                values = given(spec, None)
                if values is not None:
                    _put(weight, rows, spec.rows_first(values))
                bias = self._bias(spec)
                offsets = None if bias is None else given(bias, None)
                if offsets is not None:
                    assert self.product.bias is not None
                    _put(self.product.bias, rows, offsets)

    def _rows(self, weight: Tensor) -> list[tuple[TensorSpec, Tensor | slice]]:
        """Rows of each projection."""
        counts = self.counts or (len(weight),)
        ends = accumulate(counts)
        if self.order is None:
            rows = [slice(end - n, end) for n, end in zip(counts, ends, strict=True)]
            return list(zip(self.weights, rows, strict=True))
        places = torch.tensor(self.order, device=weight.device).argsort()
        return list(zip(self.weights, places.split(counts), strict=True))


# The place in a decoder of one or several tensors of a checkpoint.
Place: TypeAlias = TensorPlace | ProductPlace


def _put(into: Tensor, rows: Tensor | slice, values: Tensor) -> None:
    if isinstance(rows, slice):
        into[rows].copy_(values)
    else:
        into.index_copy_(0, rows, values.to(into.dtype))

"""Where a checkpoint's tensors are in a decoder, so that they can be rewritten in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from onestem.models.linear import Head, Linear

__all__ = ["Given", "Place", "ProductPlace", "TensorPlace", "bias_of"]


class Given(Protocol):
    """New values of tensors."""

    def __call__(self, name: str, as_dtype: torch.dtype | None = None) -> Tensor | None:
        """The tensor, as from a `Source`; None: it is left unchanged."""
        ...


class Place(Protocol):
    """The place in a decoder of one or several tensors of a checkpoint."""

    @property
    def names(self) -> Sequence[str]:
        """Names of these tensors."""
        ...

    def write(self, given: Given) -> None:
        """Write the tensors that are given."""
        ...

    def drop_packed(self) -> None:
        """Free packed copies, which `write` makes again."""
        ...


@dataclass(frozen=True, eq=False)
class TensorPlace:
    """A tensor of its own.

    Attributes:
        as_dtype: dtype that it is read in; None: the decoder's.
        change: turns what is read into what the decoder holds.
    """

    name: str
    tensor: Tensor
    as_dtype: torch.dtype | None
    change: Callable[[Tensor], Tensor]

    @property
    def names(self) -> Sequence[str]:
        return (self.name,)

    def write(self, given: Given) -> None:
        values = given(self.name, self.as_dtype)
        if values is not None:
            self.tensor.copy_(self.change(values))

    def drop_packed(self) -> None:
        pass


@dataclass(frozen=True, eq=False)
class ProductPlace:
    """Projections of the same input, fused into one product.

    Attributes:
        weights: names of their weights. Where there is a bias, its name ends with `bias` instead.
        counts: rows of each; (): there is one weight.
        order: the row of the joined weights at each place; None: in their order.
        transposed: the checkpoint has them as `[in_features, out_features]`.
    """

    product: Linear | Head
    weights: tuple[str, ...]
    counts: tuple[int, ...] = ()
    order: list[int] | None = None
    transposed: bool = False

    @property
    def names(self) -> Sequence[str]:
        if self._has_bias:
            return (*self.weights, *map(bias_of, self.weights))
        return self.weights

    @property
    def _has_bias(self) -> bool:
        # A head's bias has a place of its own: it is added in float32, after the product.
        return isinstance(self.product, Linear) and self.product.bias is not None

    def write(self, given: Given) -> None:
        with self.product.rewriting() as weight:
            for name, rows in self._rows(weight):
                values = given(name)
                if values is not None:
                    _put(weight, rows, values.t() if self.transposed else values)
                offsets = given(bias_of(name)) if self._has_bias else None
                if offsets is not None:
                    assert self.product.bias is not None
                    _put(self.product.bias, rows, offsets)

    def drop_packed(self) -> None:
        self.product.drop_packed()

    def _rows(self, weight: Tensor) -> list[tuple[str, Tensor | slice]]:
        """Name and rows of each projection."""
        counts = self.counts or (len(weight),)
        ends = accumulate(counts)
        if self.order is None:
            rows = [slice(end - n, end) for n, end in zip(counts, ends, strict=True)]
            return list(zip(self.weights, rows, strict=True))
        places = torch.tensor(self.order, device=weight.device).argsort()
        return list(zip(self.weights, places.split(counts), strict=True))


def bias_of(weight: str) -> str:
    """Name of the bias beside a weight."""
    return f"{weight.removesuffix('weight')}bias"


def _put(into: Tensor, rows: Tensor | slice, values: Tensor) -> None:
    if isinstance(rows, slice):
        into[rows].copy_(values)
    else:
        into.index_copy_(0, rows, values.to(into.dtype))

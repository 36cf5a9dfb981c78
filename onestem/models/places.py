"""Where a checkpoint's tensors stand in a decoder: they can be written again in the same memory."""

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
    """Tensors that are to be written."""

    def __call__(self, name: str, as_dtype: torch.dtype | None = None) -> Tensor | None:
        """As a `Source` gives it; None: it stays as it is."""
        ...


class Place(Protocol):
    """What one or several tensors of a checkpoint became."""

    @property
    def names(self) -> Sequence[str]:
        """Of these tensors."""
        ...

    def write(self, given: Given) -> None:
        """Take those that are given."""
        ...

    def drop_packed(self) -> None:
        """Free what `write` makes anew."""
        ...


@dataclass(frozen=True, eq=False)
class TensorPlace:
    """A tensor of its own.

    Attributes:
        as_dtype: in which it is read; None: the decoder's.
        change: what stands in the decoder, of what is read.
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
        order: which row of the joined weights stands at each place; None: as they are.
        transposed: they stand as `[in_features, out_features]` in the checkpoint.
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
        # A head's bias has a place of its own: it is added in float32, behind the product.
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
        """Where each projection's rows stand."""
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

"""Linear layers, each with the weight layout that is fastest where it runs.

Measured on a CPU without native 16-bit arithmetic (AVX2, two cores; milliseconds for one product
of `rows` x 896 with a weight of 9728 x 896):

| rows | float32 plain | float32 packed by oneDNN | bfloat16 plain |
|-----:|--------------:|-------------------------:|---------------:|
|    1 |           2.0 |                      1.3 |            1.0 |
|    2 |           4.4 |                      1.3 |            1.8 |
|    8 |           4.3 |                      2.1 |            7.0 |
|   16 |           5.9 |                      3.0 |           14.0 |
|   64 |            13 |                      8.4 |             56 |
|  512 |            57 |                       58 |              - |

At the other shapes of a decoder packed is faster too from 2 to 64 rows, equal at 256, and from 512
rows on plain is 5 to 14% faster; so float32 weights on a CPU are kept both ways where memory
allows, else packed. 16-bit weights on a CPU that has no 16-bit products get a packed float32 copy,
which takes every product but that of a single row: there the weight is read once and half the bytes
win. (16-bit values, products and sums in float32, one rounding at the end: what hardware with
16-bit products computes.)

On a CPU with AMX (eight threads) 16-bit weights are packed as they are: the same product of 16, 64
and 512 rows takes 0.34, 0.48 and 2.5 ms, plain 0.41, 0.79 and 3.3. Two prices are paid there: one
row of float32 takes 20 to 80% longer packed than plain, and 256 and more rows of bfloat16 a tenth
longer at 4096 x 4096.

Two more prices stand behind the figures above, measured with two threads. oneDNN makes a product
anew for each number of rows, which takes 2 to 18 ms for AMX (1 ms for AVX2), about as long as the
product itself: steps are padded to a few numbers of rows (`padded_rows`). And between 448 and 1,024
rows it deals narrow weights out badly (GFLOP/s; `benchmarks/linear.py`):

| product, bfloat16 | 1,024 rows | the same in pieces of 256 | 2,048 rows |
|-------------------|-----------:|--------------------------:|-----------:|
| 768 x 768         |        262 |                       590 |        676 |
| 896 x 1152        |        392 |                       595 |        744 |
| 4864 x 896        |        357 |                       491 |        634 |
| 2048 x 768        |        289 |                       579 |        729 |
| 768 x 2304        |        813 |                       688 |        744 |

So narrow ones are multiplied piece by piece there, and a step had better have 2,048 rows
(`step_rows`). Two tiles of rows take longer than three, 1.2 to 1.6 times as long at widths of 768
and 896 (`linear-*-few.json`): steps of 17 to 32 rows are padded to 48.

With one number of threads a product of one shape has the same bits every time. Whether a row's bits
change with the rows beside it is oneDNN's and MKL's affair and not promised: on AVX2 those of
packed products did at no shape tried, those of plain float32 products did below 16 rows, and on AMX
all kinds did at some shapes.
"""

from __future__ import annotations

import enum
import functools
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Head",
    "Layout",
    "Linear",
    "Projection",
    "choose_layout",
    "has_room",
    "padded_rows",
    "step_rows",
]

# Rows up to which a 16-bit weight is used as it is although a packed float32 copy stands by.
NATIVE_ROWS = 1

# Rows from which a plain float32 weight is faster than the packed one beside it.
PLAIN_ROWS = 384

# What oneDNN chooses its blocks for. Any hint of 16 and more gave the same speed at 1 to 512 rows;
# a hint of 1 costs a third at 4 to 64 rows.
PACK_ROWS = 64

# Where oneDNN deals AMX products out badly, and the pieces in which it does not.
NARROW_OUT = 1536
WHOLE_TO_ROWS, WHOLE_FROM_ROWS = 384, 1536
PIECE_ROWS = 256

# glibc maps larger blocks anew each time, so each of their pages faults again.
MAPPED_BYTES = 32 << 20

# Memory of logits up to which it is kept for the next step's.
KEPT_BYTES = 256 << 20

# Rows of a full step, and those with AMX, where fewer are multiplied at a lower rate (above).
STEP_ROWS, AMX_STEP_ROWS = 1024, 2048

# Rows come in multiples of a tile's, of two tiles' above so many rows, of four above twice as many.
TILE_ROWS, FINE_TO_ROWS = 16, 256
THREE_TILES = 3 * TILE_ROWS  # are multiplied faster than two

# The share of the machine's memory that weights with their second copies may take.
COPY_MEMORY_SHARE = 0.6


class Layout(enum.Enum):
    """How a weight is kept. The value is the text that a person reads."""

    PLAIN = "plain"
    PACKED = "packed"
    PACKED_AND_PLAIN = "packed, and plain for many rows"
    PACKED_FLOAT32 = "packed float32 copy"

    def itemsize(self, dtype: torch.dtype) -> int:
        """Bytes in which a weight's element is kept, in all its copies (`Linear`)."""
        if self is Layout.PACKED_FLOAT32:
            return dtype.itemsize + 4
        return dtype.itemsize * (2 if self is Layout.PACKED_AND_PLAIN else 1)

    def head_itemsize(self, dtype: torch.dtype, *, tied: bool) -> int:
        """The same of `Head`, without the embedding."""
        if self is Layout.PLAIN:
            return 0 if tied else dtype.itemsize
        return 4 if self is Layout.PACKED_FLOAT32 else dtype.itemsize


def choose_layout(dtype: torch.dtype, device: torch.device, weight_bytes: int = 0) -> Layout:
    """The layout for all weights of a model that takes `weight_bytes` in `dtype`."""
    if device.type != "cpu" or not _can_pack(dtype):
        return Layout.PLAIN
    if dtype == torch.float32:
        return Layout.PACKED_AND_PLAIN if has_room(2 * weight_bytes) else Layout.PACKED
    if _has_native_products(dtype):
        return Layout.PACKED
    with_copies = weight_bytes + 4 * weight_bytes // dtype.itemsize
    return Layout.PACKED_FLOAT32 if has_room(with_copies) else Layout.PLAIN


def has_room(num_bytes: int) -> bool:
    """Whether so many bytes of weights, second copies among them, fit a CPU's memory."""
    return num_bytes <= COPY_MEMORY_SHARE * _memory_bytes()


def padded_rows(rows: int, layout: Layout, dtype: torch.dtype) -> int:
    """How many rows to multiply where `rows` are wanted, so that few products must be made.

    Only with AMX, which takes as long for one row of a tile as for all 16.
    """
    if rows == 0 or not _is_amx_product(layout, dtype):
        return rows
    if rows <= TILE_ROWS:
        return 1 << (rows - 1).bit_length()
    if rows <= THREE_TILES:
        return THREE_TILES
    tiles = 1 if rows <= FINE_TO_ROWS else 2 if rows <= 2 * FINE_TO_ROWS else 4
    return -(-rows // (tiles * TILE_ROWS)) * tiles * TILE_ROWS


def step_rows(layout: Layout, dtype: torch.dtype) -> int:
    """How many rows a step on a CPU had better have where there is no lack of them."""
    return AMX_STEP_ROWS if _is_amx_product(layout, dtype) else STEP_ROWS


class Projection(Protocol):
    """y = x W^T + b, with W in any format.

    Attributes:
        kind: its format and product, as a person is told.
        scratch_bytes: what a product takes on a device beside its result.
        rounds: dtype of 8 bits that it rounds its rows to, and takes them in as well; None: it
            takes them as they are.
    """

    out_features: int
    in_features: int
    kind: str
    scratch_bytes: int
    rounds: torch.dtype | None

    def __call__(self, x: Any) -> Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features] in the model's dtype."""
        ...

    def pieces(self, x: Any) -> tuple[Any, ...]:
        """x in the pieces in which results that are used up at once had better be computed."""
        ...

    def tensors(self) -> list[Tensor]:
        """Every tensor that is held, to count bytes by."""
        ...


class _Weight:
    """A weight `[out_features, in_features]` in a layout.

    Attributes:
        weight: as it is; None: not kept.
        packed: by oneDNN; None: not kept, or dropped until it is written again.
    """

    layout: Layout
    weight: Tensor | None
    packed: Tensor | None

    def _keep(self, weight: Tensor, layout: Layout, *, plain: bool) -> None:
        self.layout = layout
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.weight = weight if plain else None
        self.packed = None if self.layout is Layout.PLAIN else _pack(weight, self.layout)

    @contextmanager
    def rewriting(self) -> Iterator[Tensor]:
        """The weight, whose rows are to be written in place; it is packed anew behind that."""
        weight = self.weight
        if weight is None:
            shape = (self.out_features, self.in_features)
            dropped = self.packed is None
            weight = torch.empty(shape, dtype=self.dtype) if dropped else _dense(self.packed)
        yield weight
        if self.layout is not Layout.PLAIN:
            self.packed = _pack(weight, self.layout)

    def drop_packed(self) -> None:
        """Free what `rewriting` makes anew."""
        self.packed = None


class Linear(_Weight):
    """y = x W^T + b. x [num_rows, in_features], y [num_rows, out_features], both in one dtype."""

    scratch_bytes = 0
    rounds: torch.dtype | None = None

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, layout: Layout | None = None
    ) -> None:
        """weight [out_features, in_features], bias [out_features]; both are kept, not copied."""
        layout = layout or choose_layout(weight.dtype, weight.device)
        self._keep(weight, layout, plain=layout is not Layout.PACKED)
        self.bias = bias
        self.packed_bias = _packed_bias(bias, self.layout)
        self.amx = _is_amx_product(self.layout, weight.dtype)
        self.kind = f"{str(weight.dtype).removeprefix('torch.')}, {self.layout.value}"

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None or self._is_plain(x):
            return F.linear(x, _present(self.weight), self.bias)
        if self.layout is Layout.PACKED_FLOAT32:
            return self._multiply(x.float()).to(x.dtype)
        if self._is_dealt_badly(len(x)):
            return torch.cat([self._multiply(one) for one in x.split(PIECE_ROWS)])
        return self._multiply(x)

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        whole = not self.amx or len(x) * self.out_features * x.itemsize <= MAPPED_BYTES
        return (x,) if whole else x.split(PIECE_ROWS)

    def _multiply(self, x: Tensor) -> Tensor:
        return _packed_product(x, _present(self.packed), self.packed_bias)

    def _is_dealt_badly(self, rows: int) -> bool:
        """Whether oneDNN leaves most of a product of so many rows to one thread."""
        some = WHOLE_TO_ROWS < rows < WHOLE_FROM_ROWS
        return self.amx and some and self.out_features <= NARROW_OUT

    def _is_plain(self, x: Tensor) -> bool:
        """Whether the weight as it is serves these rows better than the packed one."""
        if self.layout is Layout.PACKED_AND_PLAIN:
            return x.shape[0] >= PLAIN_ROWS
        return self.layout is Layout.PACKED_FLOAT32 and x.shape[0] <= NATIVE_ROWS

    @contextmanager
    def rewriting(self) -> Iterator[Tensor]:
        with super().rewriting() as weight:
            yield weight
        self.packed_bias = _packed_bias(self.bias, self.layout)

    def tensors(self) -> list[Tensor]:
        held = (self.weight, self.packed, self.bias, self.packed_bias)
        return [tensor for tensor in held if tensor is not None]


class LogitsMemory:
    """Memory for logits on a CPU, used again as soon as nobody holds them. The system clears fresh
    pages, which took 8 ms for 64 rows of 151,936: more than the product."""

    def __init__(self) -> None:
        self._held: np.ndarray | None = None
        self._lent: weakref.ref[np.ndarray] | None = None

    def empty(self, rows: int, width: int) -> Tensor:
        """`[rows, width]` float32."""
        size = rows * width
        if not MAPPED_BYTES < 4 * size <= KEPT_BYTES or self._is_lent():
            return torch.empty(rows, width)
        if self._held is None or len(self._held) < size:
            self._held = np.empty(size, np.float32)
        lent = self._held[:size]  # the tensor's storage keeps this object
        self._lent = weakref.ref(lent)
        return torch.from_numpy(lent).view(rows, width)

    def _is_lent(self) -> bool:
        return self._lent is not None and self._lent() is not None


class Head(_Weight):
    """Logits in float32: x [num_rows, hidden_size] -> [num_rows, vocab_size].

    Sums are handed on as float32 wherever the product can give them. Rounding them to 16 bits would
    make neighbouring tokens tie, and the greedy choice between them an accident.
    """

    def __init__(
        self, weight: Tensor, layout: Layout | None = None, bias: Tensor | None = None
    ) -> None:
        """weight [vocab_size, hidden_size]; a plain layout shares it with the embedding. bias
        [vocab_size] is added in float32.

        A packed copy of a tied weight is a second copy: an embedding row cannot be read out of it,
        and without it a step of 16 rows takes 2.7 times as long here.
        """
        layout = layout or choose_layout(weight.dtype, weight.device)
        self._keep(weight, layout, plain=layout is Layout.PLAIN)
        self.bias = bias
        self.memory = LogitsMemory()

    def __call__(self, x: Tensor) -> Tensor:
        product = self._product(x)
        return product if self.bias is None else product.add_(self.bias)

    def _product(self, x: Tensor) -> Tensor:
        if self.packed is None:
            weight = _present(self.weight)
            if x.is_cuda and x.dtype != torch.float32:
                return torch.mm(x, weight.t(), out_dtype=torch.float32)
            product = F.linear(x, weight)
        elif self.layout is Layout.PACKED_FLOAT32:
            product = _packed_product(x.float(), self.packed, None)
        else:
            product = _packed_product(x, self.packed, None)
        if product.dtype == torch.float32:
            return product
        return self.memory.empty(*product.shape).copy_(product)

    def tensors(self) -> list[Tensor]:
        """Every tensor that is held, to count bytes by."""
        held = (self.weight, self.packed, self.bias)
        return [tensor for tensor in held if tensor is not None]


def _present(weight: Tensor | None) -> Tensor:
    assert weight is not None
    return weight


def _pack(weight: Tensor, layout: Layout) -> Tensor:
    source = weight.float() if layout is Layout.PACKED_FLOAT32 else weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(source.contiguous(), PACK_ROWS)
    return packed


def _dense(packed: Tensor | None) -> Tensor:
    """What was packed, in the dtype that it was packed in."""
    return _present(packed).to_dense()


def _packed_bias(bias: Tensor | None, layout: Layout) -> Tensor | None:
    if bias is None or layout is Layout.PLAIN:
        return None
    return bias.float() if layout is Layout.PACKED_FLOAT32 else bias


def _packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights and multiplies with them. Tried, not guessed."""
    kind = dtype if _has_native_products(dtype) else torch.float32
    weight = torch.eye(16, dtype=kind)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        return bool(torch.equal(_packed_product(weight, packed, None), weight))
    except (AttributeError, RuntimeError):
        return False


def _has_native_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies `dtype` on this CPU without emulating it."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _is_amx_product(layout: Layout, dtype: torch.dtype) -> bool:
    return layout is Layout.PACKED and dtype != torch.float32 and _has_amx()


@functools.cache
def _has_amx() -> bool:
    """Whether this processor and this build of torch multiply with AMX."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return supported is not None and bool(supported())


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

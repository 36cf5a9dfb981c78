"""Linear layers, each with the weight layout that is fastest where it runs.

* float32 on a CPU: packed by oneDNN, and where memory allows plain beside it, for many rows.
* 16 bits on a CPU without 16-bit products: as it is for a single row, where reading half the bytes
  wins, and a packed float32 copy for more. Products and sums are float32, rounded once at the end,
  as by hardware with 16-bit products.
* 16 bits on a CPU with AMX: packed. oneDNN makes a new product for each number of rows, so steps
  that have such products are padded to a few numbers (`padded_rows`). It distributes narrow weights
  badly over threads, so these are multiplied in pieces.
* Elsewhere: plain.

`lab/notes/cpu.md` has the measurements that these rules follow from.

For a fixed number of threads, a product of one shape has the same bits every time. Whether a row's
bits change with the rows beside it depends on oneDNN and MKL, which do not promise it. On AVX2
packed products changed at no shape tried, plain float32 products changed below 16 rows. On AMX all
kinds changed at some shapes. `deterministic` products keep to numbers of rows that do not change
them (`onestem.models.by_row`), and to one copy of the weight.
"""

from __future__ import annotations

import enum
import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.errors import ConfigError, UnsupportedError
from onestem.models import by_row
from onestem.models.by_row import ALIGNED, in_parts, made_up, numbers_alike
from onestem.ops.rounding import RoundedRows
from onestem.threads import ram_bytes

if TYPE_CHECKING:
    from onestem.models.by_row_gpu import Form

# Maximum rows for which a 16-bit weight is used as it is, and not its packed float32 copy.
NATIVE_ROWS = 1

# Rows from which a plain float32 weight is faster than the packed one beside it.
PLAIN_ROWS = 384

# Number of rows by which oneDNN chooses its blocks. Any hint from 16 on gave the same speed at 1 to
# 512 rows; a hint of 1 costs a third at 4 to 64 rows.
PACK_ROWS = 64

# Where oneDNN distributes AMX products badly over threads, and the pieces in which it does not.
NARROW_OUT = 1536
WHOLE_TO_ROWS, WHOLE_FROM_ROWS = 384, 1536
PIECE_ROWS = 256

# glibc maps larger blocks again for each allocation, so each of their pages faults again.
MAPPED_BYTES = 32 << 20

# Maximum memory of logits that is kept for the next step.
KEPT_BYTES = 256 << 20

# Rows of a full step, without and with AMX, where fewer rows have a lower rate.
STEP_ROWS, AMX_STEP_ROWS = 1024, 2048

# Rows are padded to whole tiles; above FINE_TO_ROWS to two tiles, above twice that to four.
TILE_ROWS, FINE_TO_ROWS = 16, 256
THREE_TILES = 3 * TILE_ROWS  # multiplied faster than two

# The share of the machine's memory that weights with their second copies may take.
COPY_MEMORY_SHARE = 0.6


class Layout(enum.Enum):
    """How a weight is kept. The value is the text for people."""

    PLAIN = "plain"
    PACKED = "packed"
    PACKED_AND_PLAIN = "packed, and plain for many rows"
    PACKED_FLOAT32 = "packed float32 copy"

    def itemsize(self, dtype: torch.dtype) -> int:
        """Bytes of one element of a `Linear`'s weight, over all its copies."""
        if self is Layout.PACKED_FLOAT32:
            return dtype.itemsize + 4
        return dtype.itemsize * (2 if self is Layout.PACKED_AND_PLAIN else 1)

    def head_itemsize(self, dtype: torch.dtype, *, tied: bool) -> int:
        """The same for `Head`, without the embedding."""
        if self is Layout.PLAIN:
            return 0 if tied else dtype.itemsize
        return 4 if self is Layout.PACKED_FLOAT32 else dtype.itemsize


def choose_layout(
    dtype: torch.dtype,
    device: torch.device,
    weight_bytes: int = 0,
    *,
    deterministic: bool = False,
) -> Layout:
    """The layout for all weights of a model that takes `weight_bytes` in `dtype`. With
    `deterministic` it does not depend on the machine's memory.

    Raises:
        ConfigError: then there is no room for it.
    """
    if device.type != "cpu" or not _can_pack(dtype):
        return Layout.PLAIN
    if dtype == torch.float32:
        both = has_room(2 * weight_bytes) and not deterministic
        return Layout.PACKED_AND_PLAIN if both else Layout.PACKED
    if _has_native_products(dtype):
        return Layout.PACKED
    with_copies = weight_bytes + 4 * weight_bytes // dtype.itemsize
    if deterministic and not has_room(with_copies):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"deterministic in {name} takes {with_copies} bytes on this CPU, whose products are of "
            f"float32, and {COPY_MEMORY_SHARE} of its memory is less: use float32"
        )
    return Layout.PACKED_FLOAT32 if has_room(with_copies) else Layout.PLAIN


def has_room(num_bytes: int) -> bool:
    """Whether weights of `num_bytes`, with their second copies, fit a CPU's memory."""
    return num_bytes <= COPY_MEMORY_SHARE * ram_bytes()


def padded_rows(rows: int, layout: Layout, dtype: torch.dtype) -> int:
    """Number of rows that `rows` are padded to, so that oneDNN makes few products.

    Only AMX pads: it takes as long for one row of a tile as for all 16.
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
    """Best number of rows of a step on a CPU when enough are there."""
    return AMX_STEP_ROWS if _is_amx_product(layout, dtype) else STEP_ROWS


@dataclass(frozen=True)
class Activation:
    """An MLP's activation: up's result -> down's input, `[n, 2 * size]` (gate, up) or `[n, size]`
    -> `[n, size]`.

    Attributes:
        name: as of `Description.mlp`, where it is one of those.
        rounded: the same, rounded to the dtype that `down` takes; None: no kernel does both.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    rounded: Callable[[Tensor, torch.dtype], RoundedRows] | None = None

    def __call__(self, up: Tensor) -> Tensor:
        return self.function(up)


class Projection(ABC):
    """y = x W^T + b, with W in any format.

    Attributes:
        kind: its format and product, for people.
        scratch_bytes: memory that a product takes on a device beside its result.
        rounds: 8-bit dtype that it rounds its rows to, each by itself; it also takes rows in that
            dtype. None: it takes rows as they are.
        amx: oneDNN multiplies with AMX, and makes a product for each number of rows.
    """

    out_features: int
    in_features: int
    kind: str
    scratch_bytes: int = 0
    rounds: torch.dtype | None = None
    amx: bool = False

    @abstractmethod
    def __call__(self, x: Any) -> Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features] in the model's dtype."""

    def pieces(self, x: Any) -> tuple[Any, ...]:
        """x in pieces, as is best for results that are used up at once."""
        return (x,)

    def activated(self, x: Any, activation: Activation) -> Tensor:
        """activation(self(x)); formats that can do both at once override it."""
        return activation(self(x))


class _Weight:
    """A weight `[out_features, in_features]` in a layout.

    Attributes:
        weight: as it is; None: not kept.
        packed: by oneDNN; None: not kept, or dropped until it is written again.
        deterministic: a row's bits do not depend on the rows beside it.
        wide: a GPU's products are float32.
    """

    wide = False
    layout: Layout
    weight: Tensor | None
    packed: Tensor | None
    deterministic: bool

    def _keep(
        self, weight: Tensor, layout: Layout, *, plain: bool, deterministic: bool = False
    ) -> None:
        self.layout = layout
        self.deterministic = deterministic
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.weight = weight if plain else None
        self.packed = None if self.layout is Layout.PLAIN else _pack(weight, self.layout)

    def _whole(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product with the one copy that the layout has for any rows, not rounded."""
        if self.packed is None:
            return F.linear(x, _present(self.weight), bias)
        x = x.float() if self.layout is Layout.PACKED_FLOAT32 else x
        return packed_product(x, self.packed, bias)

    def _by_row(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`_whole`, so that the number of rows does not change a row's bits."""
        if x.is_cuda:
            from onestem.models.by_row_gpu import product

            weight = _present(self.weight)
            return product(x, weight, bias, self._form(bias is not None), wide=self.wide)
        return in_parts(lambda part: self._whole(part, bias), x, self._numbers(bias is not None))

    def _try_out(self, biased: bool) -> None:
        """Raise `UnsupportedError` where a row's bits always depend on the number of rows."""
        if self.weight is not None and self.weight.is_cuda:
            self._form(biased)
        else:
            self._numbers(biased)

    @property
    def _offset(self) -> int:
        plain = self.layout is Layout.PLAIN and self.weight is not None
        return _present(self.weight).data_ptr() % ALIGNED if plain else 0

    def _numbers(self, biased: bool) -> tuple[int, ...]:
        shape, threads = (self.out_features, self.in_features), torch.get_num_threads()
        return numbers_of(shape, self.dtype, self.layout, biased, self._offset, threads)

    def _form(self, biased: bool) -> Form:
        from onestem.models.by_row_gpu import form_of

        shape, device = (self.out_features, self.in_features), _present(self.weight).device
        return form_of(shape, self.dtype, device, biased, self.wide, self._offset)

    @contextmanager
    def rewriting(self) -> Iterator[Tensor]:
        """The weight, to be written in place by rows; it is packed again afterwards."""
        weight = self.weight
        if weight is None:
            shape = (self.out_features, self.in_features)
            if self.packed is None:
                weight = torch.empty(shape, dtype=self.dtype)
            else:
                weight = self.packed.to_dense()
        yield weight
        if self.layout is not Layout.PLAIN:
            self.packed = _pack(weight, self.layout)


class Linear(_Weight, Projection):
    """y = x W^T + b. x [num_rows, in_features], y [num_rows, out_features], both in one dtype."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        layout: Layout | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        """weight [out_features, in_features], bias [out_features]; both are kept, not copied."""
        layout = layout or choose_layout(weight.dtype, weight.device)
        self._keep(weight, layout, plain=layout is not Layout.PACKED, deterministic=deterministic)
        self.bias = bias
        self.packed_bias = _packed_bias(bias, self.layout)
        self.amx = _is_amx_product(self.layout, weight.dtype)
        self.kind = f"{str(weight.dtype).removeprefix('torch.')}, {self.layout.value}"
        if deterministic:
            self._try_out(bias is not None)

    def __call__(self, x: Tensor) -> Tensor:
        if self.deterministic:
            bias = self.bias if self.packed is None else self.packed_bias
            return self._by_row(x, bias).to(x.dtype)
        if self.packed is None or self._is_plain(x):
            return F.linear(x, _present(self.weight), self.bias)
        if self.layout is Layout.PACKED_FLOAT32:
            return self._multiply(x.float()).to(x.dtype)
        if self._is_dealt_badly(len(x)):
            return torch.cat([self._multiply(one) for one in x.split(PIECE_ROWS)])
        return self._multiply(x)

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """See `Projection`: with AMX, for results that glibc would map again for each."""
        whole = not self.amx or len(x) * self.out_features * x.itemsize <= MAPPED_BYTES
        return (x,) if whole else x.split(PIECE_ROWS)

    def _multiply(self, x: Tensor) -> Tensor:
        return packed_product(x, _present(self.packed), self.packed_bias)

    def _is_dealt_badly(self, rows: int) -> bool:
        """Whether oneDNN leaves most of a product of `rows` rows to one thread."""
        some = WHOLE_TO_ROWS < rows < WHOLE_FROM_ROWS
        return self.amx and some and self.out_features <= NARROW_OUT

    def _is_plain(self, x: Tensor) -> bool:
        """Whether the plain weight is better for these rows than the packed one."""
        if self.layout is Layout.PACKED_AND_PLAIN:
            return x.shape[0] >= PLAIN_ROWS
        return self.layout is Layout.PACKED_FLOAT32 and x.shape[0] <= NATIVE_ROWS

    @contextmanager
    def rewriting(self) -> Iterator[Tensor]:
        """The weight, to be written in place by rows, and the bias beside it; both are packed again
        afterwards."""
        with super().rewriting() as weight:
            yield weight
        self.packed_bias = _packed_bias(self.bias, self.layout)


class LogitsMemory:
    """Memory for logits on a CPU, reused once the last logits are freed. The system clears fresh
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

    Sums stay float32 wherever the product can return them. Rounded to 16 bits, neighbouring tokens
    would tie, and the greedy choice between them would be an accident.
    """

    wide = True

    def __init__(
        self,
        weight: Tensor,
        layout: Layout | None = None,
        bias: Tensor | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        """weight [vocab_size, hidden_size]; a plain layout shares it with the embedding. bias
        [vocab_size] is added in float32.

        A packed copy of a tied weight is a second copy, since embedding rows cannot be read from
        it. Without it a step of 16 rows takes 2.7 times as long here.
        """
        layout = layout or choose_layout(weight.dtype, weight.device)
        self._keep(weight, layout, plain=layout is Layout.PLAIN, deterministic=deterministic)
        self.bias = bias
        self.memory = LogitsMemory()
        if deterministic:
            self._try_out(biased=False)

    def __call__(self, x: Tensor) -> Tensor:
        product = self._product(x)
        return product if self.bias is None else product.add_(self.bias)

    def _product(self, x: Tensor) -> Tensor:
        if self.deterministic:
            product = self._by_row(x, None)
        elif self.packed is None:
            weight = _present(self.weight)
            if x.is_cuda and x.dtype != torch.float32:
                return torch.mm(x, weight.t(), out_dtype=torch.float32)
            product = F.linear(x, weight)
        else:
            product = self._whole(x, None)
        if product.dtype == torch.float32:
            return product
        return self.memory.empty(*product.shape).copy_(product)


def held_tensors(part: object) -> Iterator[Tensor]:
    """Every tensor in a product, a layer or another part of a decoder, to count bytes by; one that
    is shared comes again. Parts that have more than weights say themselves what counts."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for one in part:
            yield from held_tensors(one)
    elif hasattr(part, "tensors"):
        yield from part.tensors()
    elif is_dataclass(part) or isinstance(part, _Weight | Projection):
        yield from held_tensors([*vars(part).values()])


def _present(weight: Tensor | None) -> Tensor:
    assert weight is not None
    return weight


def _pack(weight: Tensor, layout: Layout) -> Tensor:
    source = weight.float() if layout is Layout.PACKED_FLOAT32 else weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(source.contiguous(), PACK_ROWS)
    return packed


def _packed_bias(bias: Tensor | None, layout: Layout) -> Tensor | None:
    if bias is None or layout is Layout.PLAIN:
        return None
    return bias.float() if layout is Layout.PACKED_FLOAT32 else bias


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [num_rows, in_features] times a weight that oneDNN packed, plus bias [out_features]: in x's
    dtype, [num_rows, out_features]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


@functools.cache
def numbers_of(
    shape: tuple[int, int],
    dtype: torch.dtype,
    layout: Layout,
    biased: bool,
    offset: int,
    threads: int,
) -> tuple[int, ...]:
    """Numbers of rows at which products of a shape agree, with as many `threads` as torch has now;
    see `onestem.models.by_row`. This is tried out, with another weight that is freed afterwards."""
    row, weight, bias = made_up(*shape, dtype, offset)
    product = _Weight()
    product._keep(weight, layout, plain=layout is Layout.PLAIN)
    del weight
    added = None
    if biased:
        added = bias if layout is Layout.PLAIN else _packed_bias(bias, layout)
    large = shape[0] * shape[1] >= by_row.LARGE or _is_amx_product(layout, dtype)
    most = by_row.PIECE if large else by_row.LADDER[-1]
    numbers = numbers_alike(lambda x: product._whole(x, added), row, most)
    if len(numbers) > 1:
        return numbers
    raise UnsupportedError(
        f"products with a weight {shape[0]} x {shape[1]} in {dtype} have other bits at each number "
        f"of rows here (torch {torch.__version__}, {threads} threads): leave deterministic out"
    )


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights and multiplies with them. This is tried out."""
    kind = dtype if _has_native_products(dtype) else torch.float32
    weight = torch.eye(16, dtype=kind)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        return bool(torch.equal(packed_product(weight, packed, None), weight))
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

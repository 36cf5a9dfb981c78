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

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from onestem.models.cuts import Cut, covering
from onestem.models.formats.held import Channels, Groups, Weight, of_columns
from onestem.models.quantization import Scheme

# Dtypes of tensors that are not quantised, by safetensors' names.
FLOATS = ("BF16", "F16", "F32", "F64")
SCALES = (*FLOATS, "F8_E8M0")

# Tensors of scales, of which a module has one.
SCALED_BY = ("weight_scale", "weight_scale_inv", "scales")

# Order of eight columns in an int32 of AWQ, lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

# The smallest group that products take, and a pair of them.
PART, PAIR = 32, 64

Shape = tuple[int, ...]

# get(name, cut=None): a module's stored tensor by its name within the module, or a part of it.
# None: it is not there.
Get = Callable[..., Tensor | None]


@dataclass(frozen=True)
class Expected:
    """Shape and possible dtypes (by safetensors' names) of a tensor of a checkpoint.

    Attributes:
        shape: None: any, of a tensor that is not used.
        shorter: other shapes of the same numbers.
    """

    shape: Shape | None
    dtypes: tuple[str, ...] = FLOATS
    optional: bool = False
    shorter: tuple[Shape, ...] = ()


def main_tensor(scheme: Scheme) -> str:
    """The tensor that only a quantised module has. A quantised `weight` is known by its dtype."""
    names = {"packed": "weight_packed", "gptq": "qweight", "awq": "qweight"}
    return names.get(scheme.storage, "weight")


def stored_tensors(
    scheme: Scheme, out: int, size: int, names: Collection[str]
) -> dict[str, Expected]:
    """Tensors of a module `[out, size]`: name within the module -> what is expected there. `names`:
    of those that the files hold."""
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
    scales = (_parts(out, scheme.rows), groups)
    shorter: tuple[Shape, ...] = () if groups > 1 else ((scales[0],),)
    shorter += ((),) if scales == (1, 1) else ()
    # Models' authors call the scales of blocks so.
    inverse = "weight_scale_inv" in names or (
        scheme.storage == "float8" and scheme.rows not in (1, None) and "weight_scale" not in names
    )
    return {
        "weight": Expected((out, size), code),
        "weight_scale" + "_inv" * inverse: Expected(scales, SCALES, shorter=shorter),
        # Scales of calibrated activations are not used: each row is rounded by its own maximum.
        "input_scale": Expected(None, SCALES, optional=True),
        "weight_zero_point": Expected(None, ("I8", "F8_E4M3", *FLOATS), optional=True),
    }


def wrong_values(scheme: Scheme, out: int, size: int, get: Get) -> tuple[str, str] | None:
    """(the first stored tensor whose numbers make no sense, what is wrong with it); None: all do.
    Codes are not read."""
    for name in SCALED_BY:
        scales = get(name)
        if scales is not None and not scales.float().isfinite().all():
            return name, "has numbers that are not finite"
    zero = get("weight_zero_point")
    if scheme.storage in ("float8", "int8") and zero is not None and zero.float().any():
        return "weight_zero_point", "is not 0, expected symmetric"
    shape = get("weight_shape")
    if shape is not None and shape.tolist() != [out, size]:
        return "weight_shape", f"is {shape.tolist()}, expected {[out, size]}"
    for name in ("g_idx", "weight_g_idx"):
        at, group = get(name), scheme.columns or size
        if at is not None and not torch.equal(at.long().sort()[0], torch.arange(size) // group):
            return name, f"does not name {group} inputs for each group"
    return None


def stored_weight(scheme: Scheme, get: Get, out: int, size: int, cut: Cut | None) -> Weight:
    """The weight of a module from its tensors, which must be those of `stored_tensors`, with no
    `wrong_values`.

    Args:
        cut: the part of the weight `[out, size]` that is wanted: spans of rows, or one of columns.
            Only its words of codes are read; scales and zero points, which are few, are read whole.
            A cut through groups makes smaller groups. Where the columns of a group are apart
            ("act-order"), these are also filled up.
    """
    return _Reader(scheme, get, out, size, cut).weight()


class _Reader:
    """Reads one module's weight, or the part `cut` of it."""

    def __init__(self, scheme: Scheme, get: Get, out: int, size: int, cut: Cut | None) -> None:
        self.scheme, self.get = scheme, get
        self.out, self.size = out, size
        self.cut = None if cut is None else cut.within((out, size)[cut.dim])

    def weight(self) -> Weight:
        packed = {"packed": self.packed, "gptq": self.gptq, "awq": self.awq}
        return packed.get(self.scheme.storage, self.eight_bits)()

    def needed(self, name: str, cut: Cut | None = None) -> Tensor:
        tensor = self.get(name, cut)
        assert tensor is not None
        return tensor

    def codes(
        self, name: str, unpacked: Callable[[Tensor], Tensor], packed: int, *, turned: bool = False
    ) -> Tensor:
        """The codes that are wanted, of a tensor that `unpacked` makes `[out, size]`.

        Args:
            packed: dimension (0 or 1) that has several codes in a word.
            turned: whether the stored tensor is transposed.
        """
        cut = self.cut
        if cut is None or cut.dim != packed:
            at = None if cut is None else Cut(cut.dim ^ turned, cut.spans)
            return unpacked(self.needed(name, at)).narrow(packed, 0, (self.out, self.size)[packed])
        words, places = covering(cut.spans, 32 // self.scheme.bits)
        codes = unpacked(self.needed(name, Cut(cut.dim ^ turned, words)))
        return codes.index_select(packed, torch.tensor(places, device=codes.device))

    def eight_bits(self) -> Weight:
        codes = self.needed("weight", self.cut)
        scales = self.get("weight_scale_inv")
        scales = self.needed("weight_scale") if scales is None else scales
        scales = self.by_row(scales)
        if scales.shape[1] == 1 and self.scheme.rounds_rows:
            return Channels(codes, self.of_rows(scales)[:, 0].contiguous())
        if codes.dtype != torch.int8:
            return self.groups(codes, scales, None)
        shifted = (codes.short() + 128).to(torch.uint8)
        return self.groups(shifted, scales, self.half(scales))

    def packed(self) -> Weight:
        bits = self.scheme.bits
        codes = self.codes("weight_packed", lambda words: _unpacked(words, bits), packed=1)
        scales = self.by_row(self.needed("weight_scale"))
        zeros = self.half(scales)
        if not self.scheme.symmetric:
            stored = self.needed("weight_zero_point")
            zeros = _unpacked(stored.t(), bits)[:, : self.out].t().short().contiguous()
        return self.groups(codes, scales, zeros, self.get("weight_g_idx"))

    def gptq(self) -> Weight:
        bits = self.scheme.bits
        codes = self.codes("qweight", lambda words: _unpacked(words.t(), bits), 1, turned=True)
        zeros = _unpacked(self.needed("qzeros"), bits)[:, : self.out].t()
        zeros = (zeros.short() + self.scheme.zero_offset).contiguous()
        scales = self.by_row(self.needed("scales").t())
        return self.groups(codes, scales, zeros, self.get("g_idx"))

    def awq(self) -> Weight:
        in_order = lambda words: _in_awq_order(_unpacked(words, 4)).t()  # noqa: E731
        codes = self.codes("qweight", in_order, 0, turned=True)
        zeros = _in_awq_order(_unpacked(self.needed("qzeros"), 4)).t().short().contiguous()
        scales = self.by_row(self.needed("scales").t())
        return self.groups(codes, scales, zeros)

    @property
    def group(self) -> int:
        return self.scheme.columns or self.size

    def half(self, scales: Tensor) -> Tensor:
        return torch.full_like(scales, 1 << (self.scheme.bits - 1), dtype=torch.int16)

    def by_row(self, scales: Tensor) -> Tensor:
        """float32 `[out, groups]` of scales per tensor, row, group or block."""
        shape = (_parts(self.out, self.scheme.rows), _parts(self.size, self.scheme.columns))
        by_part = scales.float().reshape(shape)
        rows = by_part.repeat_interleave(self.scheme.rows or self.out, dim=0)
        return rows[: self.out].contiguous()

    def of_rows(self, values: Tensor) -> Tensor:
        """The wanted rows of scales or zero points."""
        return values if self.cut is None or self.cut.dim == 1 else self.cut.of(values).clone()

    def groups(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, at: Tensor | None = None
    ) -> Weight:
        """The wanted codes, with scales and zero points of all rows and groups. `at`: each column's
        group; None: groups are consecutive. Otherwise ("act-order") the columns of each group are
        brought together."""
        group, bits = self.group, self.scheme.bits
        scales = self.of_rows(scales)
        zeros = None if zeros is None else self.of_rows(zeros)
        places = torch.arange(self.size, device=codes.device) // group
        if at is None or torch.equal(at.long(), places):
            weight = Groups(codes.contiguous(), scales, zeros, group, bits)
            if self.cut is None or self.cut.dim == 0:
                return weight
            return of_columns(weight, self.cut.spans[0], self.size)
        order = at.long().argsort(stable=True)
        if self.cut is not None and self.cut.dim == 1:
            assert zeros is not None
            return self.some_of_each(codes, scales, zeros, self.cut.of(at.long()[None])[0])
        return Groups(codes[:, order].contiguous(), scales, zeros, group, bits, order)

    def some_of_each(self, codes: Tensor, scales: Tensor, zeros: Tensor, at: Tensor) -> Weight:
        """Some columns of each group, in groups of `PART`, filled up with columns of weight 0 for
        input 0. A dense weight where no code means weight 0."""
        if self.group % PART or int(zeros.max()) >= 1 << self.scheme.bits:
            return (codes.float() - zeros[:, at]) * scales[:, at]
        counts = at.bincount(minlength=scales.shape[1])
        wanted = -(-counts // PART) * PART
        wanted[0] += int(wanted.sum()) % PAIR  # products of 4 bits take groups in pairs
        groups = torch.arange(len(wanted), device=at.device).repeat_interleave(wanted)
        order = at.argsort(stable=True)
        # Each group moves by the columns that fill up the groups before it.
        moved = (wanted.cumsum(0) - wanted) - (counts.cumsum(0) - counts)
        places = torch.arange(len(at), device=at.device) + moved[at[order]]
        filled = zeros[:, groups].to(torch.uint8).index_copy_(1, places, codes[:, order])
        inputs = torch.zeros_like(groups).index_copy_(0, places, order)
        parts = groups[::PART]
        held = scales[:, parts].contiguous(), zeros[:, parts].contiguous()
        return Groups(filled, *held, PART, self.scheme.bits, inputs)


def _parts(size: int, part: int | None) -> int:
    return 1 if part is None else -(-size // part)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 `[n, m]` -> uint8 `[n, m * 32 / bits]`, lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    codes = words.to(torch.int32)[..., None] >> shifts & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(1)


def _in_awq_order(codes: Tensor) -> Tensor:
    """`[n, columns]` in the order of unpacking -> in the order of columns."""
    eights = codes.unflatten(1, (-1, 8))
    return (
        torch.empty_like(eights)
        .index_copy_(2, torch.tensor(AWQ_ORDER, device=codes.device), eights)
        .flatten(1)
    )

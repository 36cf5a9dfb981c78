"""Where a decoder's tensors lie in a GGUF file, and how they are arranged there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from onestem.errors import WeightsError
from onestem.models.cuts import Cut
from onestem.models.formats.held import Groups, Pieces, of_columns
from onestem.models.gguf.architectures import NAMES, Architecture, architecture_of
from onestem.models.gguf.blocks import pieces_of
from onestem.models.gguf.file import RawTensor, open_gguf
from onestem.models.gguf.values import values_of
from onestem.models.names import RATES, Role, listed
from onestem.models.tensors import Kind, Tensors, TensorSpec

# Tensors that are fields of the model, and read with them.
_FIELDS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# What names end with, where it is not `.weight`.
_ENDS = {Role.DELTA_DECAY: "", Role.DELTA_STEP: ".bias"}

_OF_VALUE_HEADS = (
    Role.DELTA_QKV, Role.DELTA_Z, Role.DELTA_B, Role.DELTA_A, Role.DELTA_FILTER, Role.DELTA_DECAY,
    Role.DELTA_STEP,
)  # fmt: skip

Arrange = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a decoder, made of one or two of a file.

    Attributes:
        arrange: makes it of theirs.
        transposed: its last two dimensions are swapped after that.
        number: ours of theirs, in float32; None: they are the same.
        heads: groups of heads, and heads, in whose order their columns are (`by_group`); None: in
            that of ours.
    """

    shape: tuple[int, ...]
    parts: tuple[RawTensor, ...]
    arrange: Arrange
    transposed: bool = False
    number: Callable[[Tensor], Tensor] | None = None
    heads: tuple[int, int] | None = None

    @property
    def file(self) -> Path:
        return self.parts[0].file

    @property
    def name(self) -> str:
        return self.parts[0].name

    def read(self, cut: Cut | None, dtype: torch.dtype) -> Tensor:
        """The tensor, or a part of it, in `dtype`."""
        number = self.number
        if number is not None:
            read = [number(values_of(part, torch.float32)).to(dtype) for part in self.parts]
        else:
            read = [values_of(part, dtype) for part in self.parts]
        whole = self.arrange(read)
        if self.heads is not None:
            whole = by_group(*self.heads, 0, [whole.T]).T.contiguous()
        whole = (whole.mT.contiguous() if self.transposed else whole).reshape(self.shape)
        return whole if cut is None else cut.of(whole)

    def groups(self, cut: Cut | None) -> Groups | Pieces:
        """The blocks of a matrix, or a part of it: `[out_features, in_features]`."""
        (raw,) = self.parts
        theirs = torch.arange(raw.num_rows)
        at = self.arrange([theirs[:, None]])[:, 0]
        if cut is None and self.heads is None and torch.equal(at, theirs):
            return pieces_of(raw)
        weight = pieces_of(raw).whole()
        if self.heads is not None:
            weight = _columns_by_group(*self.heads, weight)
        if cut is not None and cut.dim == int(self.transposed):
            kept = cut.within(len(at)).spans
            return weight.rows(torch.cat([at[slice(*span)] for span in kept])).filled(len(cut))
        if cut is not None:
            (span,), size = cut.spans, weight.codes.shape[1]
            codes = weight.codes[:, slice(*span)].contiguous()
            weight = of_columns(replace(weight, codes=codes), span, size)
        return weight if torch.equal(at, theirs) else weight.rows(at)


def gguf_tensors(path: Path, tensors: Tensors) -> dict[str, GgufTensor]:
    """All `tensors`, and those of single experts, by their names in a checkpoint.

    Raises:
        WeightsError: names what is missing, unknown or of another shape.
    """
    file = open_gguf(path)
    one, kind = architecture_of(file), file.header.fields["general.architecture"]
    found, missing, wrong = {}, [], []
    used = set(_FIELDS)
    for spec in tensors:
        shapes, arrange = _arranged(spec, tensors, one)
        parts = []
        for name, shape in shapes.items():
            used.add(name)
            raw = file.tensors.get(name)
            if raw is None:
                missing.append(name)
            elif _squeezed(raw.shape) != _squeezed(shape):
                wrong.append(f"{name} is {list(raw.shape)}, expected {list(shape)}")
            else:
                parts.append(raw)
        number, heads, delta = None, None, tensors.config.delta
        if spec.role is Role.DELTA_DECAY:
            number = _logarithm
        elif spec.kind is Kind.NORM and tensors.config.norm_offset:
            number = partial(torch.add, torch.tensor(-tensors.config.norm_offset))
        if spec.role is Role.DELTA_OUTPUT and one.tiled and delta is not None:
            heads = delta.num_key_heads, delta.num_value_heads
        found[spec.name] = GgufTensor(
            spec.shape, tuple(parts), arrange, spec.transposed, number, heads
        )
    for whole in tensors.of_experts:
        for index, expert in enumerate(tensors.singles(whole)):
            for single, raw in zip(expert, found[whole.name].parts, strict=False):
                found[single.name] = GgufTensor(single.shape, (raw.part(index),), _as_it_is)
    if missing:
        raise WeightsError(f"{path} lacks tensors that {kind} needs: {listed(missing)}")
    if wrong:
        raise WeightsError(f"{path} holds tensors of other shapes: {listed(wrong)}")
    blocks = file.header.fields[f"{kind}.block_count"]  # with those of tokens after the next one
    assert isinstance(blocks, int)
    beside = tuple(f"blk.{n}." for n in range(tensors.config.num_layers, blocks))
    unknown = sorted(name for name in set(file.tensors) - used if not name.startswith(beside))
    if unknown:
        raise WeightsError(f"{path} holds tensors that {kind} has no place for: {listed(unknown)}")
    return found


def _squeezed(shape: Sequence[int]) -> list[int]:
    """Without dimensions of 1, which converters leave out."""
    return [size for size in shape if size != 1]


def _arranged(
    spec: TensorSpec, tensors: Tensors, one: Architecture
) -> tuple[dict[str, tuple[int, ...]], Arrange]:
    """Names and shapes of the file's tensors that make one up, and how they do."""
    config, names = tensors.config, {**NAMES, **one.names}
    if config.block == "parallel_two_norms":  # of Falcon, which has one norm before both otherwise
        names |= {Role.INPUT_NORM: "attn_norm_2", Role.POST_NORM: "attn_norm"}
    at = "" if spec.layer is None else f"blk.{spec.layer}."
    end = ".bias" if spec.kind is Kind.BIAS else _ENDS.get(spec.role, ".weight")

    def named(*roles: Role) -> list[str]:
        return [f"{at}{names[role]}{end}" for role in roles]

    shape = spec.shape
    if spec.transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    arrange: Arrange = _as_it_is
    roles: tuple[Role, ...] = (spec.role,)
    if spec.role is Role.EXPERTS_UP:
        roles = (Role.EXPERT_GATE, Role.EXPERT_UP)
        shape = (shape[0], shape[1] // 2, *shape[2:])
        arrange = _alternating if tensors.alternates else _joined
    elif spec.role is Role.EXPERTS_DOWN:
        roles = (Role.EXPERT_DOWN,)
    elif one.turned and spec.role in (Role.Q, Role.K):
        heads = config.num_q_heads if spec.role is Role.Q else config.num_kv_heads
        arrange = partial(by_halves, heads)
    elif spec.role is Role.QKV and config.tensor_names.grouped:
        arrange = partial(_by_kv_head, config.num_q_heads, config.num_kv_heads)
    elif config.delta is not None:
        keys, values = config.delta.num_key_heads, config.delta.num_value_heads
        place = (Role.DELTA_B, Role.DELTA_A).index(spec.role) if spec.role in RATES[:2] else 0
        if spec.role in RATES and names[Role.DELTA_B] == names[Role.DELTA_A]:
            shape = (2 * shape[0], *shape[1:])
            arrange = partial(_of_both, keys, place)
        elif one.tiled and spec.role in _OF_VALUE_HEADS:
            has_keys = spec.role in (Role.DELTA_QKV, Role.DELTA_FILTER)
            before = 2 * keys * config.delta.key_dim if has_keys else 0
            arrange = partial(by_group, keys, values, before)
    return dict.fromkeys(named(*roles), shape), arrange


def _as_it_is(parts: Sequence[Tensor]) -> Tensor:
    return parts[0]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Gate, then up, of each expert."""
    return torch.cat(list(parts), dim=1)


def _alternating(parts: Sequence[Tensor]) -> Tensor:
    """Rows of gate and up in turns."""
    return torch.stack(list(parts), dim=2).flatten(1, 2)


def by_halves(heads: int, parts: Sequence[Tensor]) -> Tensor:
    """Rows of each head for pairs (i, i + half), where the file has them as neighbours."""
    rows = parts[0]
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def by_group(groups: int, heads: int, before: int, parts: Sequence[Tensor]) -> Tensor:
    """Rows with the heads of each group together, where the file has the first head of every group,
    then the second of every group. The rows `before` these are as they are."""
    rows = parts[0][before:]
    tiled = rows.reshape(heads // groups, groups, -1)
    return torch.cat([parts[0][:before], tiled.transpose(0, 1).reshape(rows.shape)])


def _columns_by_group(groups: int, heads: int, weight: Groups) -> Groups:
    """The same of columns. A head that divides groups of columns makes smaller ones."""
    size = weight.codes.shape[1]
    group = math.gcd(weight.group, size // heads)
    at = by_group(groups, heads, 0, [torch.arange(size)])
    numbers = weight.columns(at[::group] // weight.group)
    return replace(weight, codes=weight.codes[:, at].contiguous(), group=group, **numbers)


def _of_both(groups: int, place: int, parts: Sequence[Tensor]) -> Tensor:
    """The rows of beta or of the decay, where the file has those of each group together."""
    both = parts[0].view(groups, 2, -1, *parts[0].shape[1:])
    return both[:, place].flatten(0, 1)


def _logarithm(rates: Tensor) -> Tensor:
    """Logarithms of rates, which files have below 0."""
    return rates.neg().log()


def _by_kv_head(q_heads: int, kv_heads: int, parts: Sequence[Tensor]) -> Tensor:
    """For each KV head its query heads, its k and its v, where the file has all q, all k, all v."""
    rows = parts[0]
    size = rows.shape[0] // (q_heads + 2 * kv_heads)
    spans = [q_heads * size, kv_heads * size, kv_heads * size]
    grouped = [part.view(kv_heads, -1, *rows.shape[1:]) for part in rows.split(spans)]
    return torch.cat(grouped, dim=1).reshape(rows.shape)

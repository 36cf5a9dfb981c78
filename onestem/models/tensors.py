"""The table of a model's tensors. Each is described once: its name in the checkpoint, its shape,
what it is for, and what a rank holds of it.

Checks of files, sizes, random values, updates and cuts for ranks read it; the builder of a decoder
asks it for tensors by their role.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from onestem.models.config import ModelConfig
from onestem.models.cuts import Axis, Cut
from onestem.models.description import Experts, LayerHeads
from onestem.models.names import Role
from onestem.models.part import Axes
from onestem.models.ranks import ALONE, Ranks
from onestem.ops.experts import MX_BLOCK


class Kind(enum.Enum):
    """What a tensor's numbers are, and so how they are stored, held and made up."""

    TABLE = enum.auto()  # looked up by row
    MATRIX = enum.auto()  # of a product in the model's dtype, in any format
    HEAD = enum.auto()  # of a product in float32
    EXPERTS = enum.auto()  # matrices of all experts
    CODES = enum.auto()  # the same in mxfp4: two values in a byte
    POWERS = enum.auto()  # exponents of mxfp4's blocks
    BIAS = enum.auto()
    NORM = enum.auto()
    VECTOR = enum.auto()  # float32 in a model of any dtype
    FILTER = enum.auto()  # of a convolution of each channel by itself
    SCALAR = enum.auto()


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        shape: of the whole tensor: `[rows, width]` of a table, `[out_features, in_features]` of a
            matrix, `[num, out_features, in_features]` of experts (`[num, out_features, blocks, 16]`
            in mxfp4).
        layer: index; None: it belongs to no layer.
        cut: the part that the rank holds; None: all.
        module: the module that has it as its weight, which may be stored in another format, as
            other tensors of the module; None: it is always stored as it is.
        transposed: its last two dimensions are swapped.
        scales, bias: the tensors beside a weight; they have its role.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    kind: Kind
    layer: int | None = None
    cut: Cut | None = None
    module: str | None = None
    transposed: bool = False
    scales: TensorSpec | None = None
    bias: TensorSpec | None = None

    @property
    def shares_inputs(self) -> bool:
        """Whether each rank has some of a matrix's inputs, so that results are summed."""
        return self.cut is not None and self.cut.dim == int(not self.transposed)

    def rows_first(self, tensor: Tensor) -> Tensor:
        """`[..., out_features, in_features]`: a view of a tensor of this shape."""
        return tensor.mT if self.transposed else tensor

    def with_others(self) -> Iterator[TensorSpec]:
        """This tensor and those beside it."""
        for one in (self, self.scales, self.bias):
            if one is not None:
                yield one


# The tensors of a layer, or of the model around its layers.
ByRole = Mapping[Role, TensorSpec]


class Tensors:
    """All tensors of a model.

    Attributes:
        config: of the whole model.
        ranks: the rank whose cuts are given.
        model: tensors that belong to no layer.
        layers: tensors of each layer.
    """

    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE) -> None:
        self.config = config
        self.ranks = ranks
        self.model: ByRole = {one.role: one for one in _Maker(config, ranks).of_model()}
        self.layers: Sequence[ByRole] = [
            {one.role: one for one in _Maker(config, ranks, index).of_layer(index)}
            for index in range(config.num_layers)
        ]
        self._singles: dict[str, list[tuple[TensorSpec, ...]]] = {}

    def __iter__(self) -> Iterator[TensorSpec]:
        """Every tensor of the checkpoint, biases and scales included, layer by layer."""
        for part in (self.model, *self.layers):
            for one in part.values():
                yield from one.with_others()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name in the checkpoint -> shape of the whole tensor."""
        return {one.name: one.shape for one in self}

    @property
    def matrices(self) -> list[TensorSpec]:
        """Weights that have formats (no routers, no experts), in the order of layers."""
        return [one for one in self if one.kind is Kind.MATRIX]

    @property
    def head(self) -> TensorSpec:
        """The weight of the head: of a tied model the embedding."""
        return self.model.get(Role.HEAD, self.model[Role.EMBEDDING])

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model: two for each byte of mxfp4, none for scales."""
        each = {Kind.CODES: 2, Kind.POWERS: 0}
        return sum(math.prod(one.shape) * each.get(one.kind, 1) for one in self)

    @property
    def of_experts(self) -> list[TensorSpec]:
        """Weights of all experts of a layer."""
        roles = (Role.EXPERTS_UP, Role.EXPERTS_DOWN)
        return [part[role] for part in self.layers for role in roles if role in part]

    def singles(self, whole: TensorSpec) -> list[tuple[TensorSpec, ...]]:
        """For each expert the matrices that make up its part of a weight of all experts, if they
        are concatenated by rows: most files hold these instead."""
        if whole.name not in self._singles:
            maker = _Maker(self.config, self.ranks, whole.layer)
            self._singles[whole.name] = maker.singles(whole.role)
        return self._singles[whole.name]

    @property
    def alternates(self) -> bool:
        """Whether rows of gate and up alternate in a weight of all experts."""
        return self.config.tensor_names.alternating

    def halves(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Gate and up, `[num, size, ...]` each, of `[num, 2 * size, ...]` of all experts."""
        if self.alternates:
            return tensor[:, 0::2], tensor[:, 1::2]
        return tensor.chunk(2, dim=1)


class _Maker:
    """Describes the tensors of one layer, or of the model around its layers."""

    def __init__(self, config: ModelConfig, ranks: Ranks, layer: int | None = None) -> None:
        self.config, self.names = config, config.tensor_names
        self.layer = layer
        self.at = "" if layer is None else self.names.layer.format(layer)
        self.axes = Axes(config, ranks)
        self.hidden = Axis(config.hidden_size)

    def of_model(self) -> Iterator[TensorSpec]:
        config, hidden, rows = self.config, self.hidden, self.axes.vocabulary
        yield self.weight(Role.EMBEDDING, rows, hidden, kind=Kind.TABLE)
        yield self.norm(Role.NORM, bias=config.norm_bias)
        if Role.POSITIONS in self.names:
            positions = Axis(config.max_position_embeddings)
            yield self.weight(Role.POSITIONS, positions, hidden, kind=Kind.TABLE)
        if not config.tie_embeddings:
            yield self.weight(Role.HEAD, rows, hidden, kind=Kind.HEAD)
        if config.head_bias:
            name = f"{self.names[Role.HEAD]}.bias"
            yield self.spec(Role.HEAD_BIAS, Kind.BIAS, rows, name=name)
        if config.token_vectors:
            width = Axis(config.num_layers * config.token_vectors)
            yield self.weight(Role.TOKEN_VECTORS, rows, width, kind=Kind.TABLE)
            yield self.weight(Role.VECTORS_PROJECTION, width, hidden)
            yield self.norm(Role.VECTORS_NORM, Axis(config.token_vectors))

    def of_layer(self, index: int) -> Iterator[TensorSpec]:
        config, hidden = self.config, self.hidden
        for role in (Role.INPUT_NORM, Role.OUTPUT_NORM, Role.POST_NORM, Role.DOWN_NORM):
            if role in self.names:
                yield self.norm(role, bias=config.norm_bias)
        if config.has_state(index):
            yield from self.delta_rule()
        else:
            yield from self.attention(config.heads[index])
        if config.has_experts(index):
            yield from self.experts()
        if config.has_mlp(index):
            yield from self.mlp(config.mlp_size(index) // config.intermediate_size)
        if config.token_vectors:
            yield self.weight(Role.VECTORS_GATE, Axis(config.token_vectors), hidden)
            yield self.weight(Role.VECTORS_OUTPUT, hidden, Axis(config.token_vectors))
            yield self.norm(Role.VECTORS_OUTPUT_NORM)
        if Role.SCALAR in self.names:
            yield self.spec(Role.SCALAR, Kind.SCALAR, Axis(1))

    def attention(self, heads: LayerHeads) -> Iterator[TensorSpec]:
        config, hidden, size = self.config, self.hidden, heads.head_dim
        q = self.axes.query_heads.times(size)
        kv = self.axes.kv_heads(heads.num_kv_heads).times(size)
        own = 1 if heads.kv_layer is not None else 2 if heads.value_is_key else 3
        queries = q.times(1 + config.output_gate)
        parts = [(Role.Q, queries), (Role.K, kv), (Role.V, kv)][:own]
        if Role.QKV in self.names:
            fused = self.by_kv_head(heads) if self.names.grouped else q.then(kv).then(kv)
            parts = [(Role.QKV, fused)]
        for role, rows in parts:
            yield self.weight(role, rows, hidden, bias=config.qkv_bias)
        yield self.weight(Role.OUTPUT, hidden, q, bias=config.o_bias)
        for role, rows in [(Role.Q_NORM, q), (Role.K_NORM, kv)][: min(own, 2)]:
            if role in self.names:
                yield self.norm(role, rows if config.qk_norm_of_all else Axis(size))
        if Role.SINKS in self.names:
            yield self.spec(Role.SINKS, Kind.VECTOR, self.axes.query_heads)

    def delta_rule(self) -> Iterator[TensorSpec]:
        delta, hidden = self.config.delta, self.hidden
        assert delta is not None
        key_heads, heads = map(self.axes.even, (delta.num_key_heads, delta.num_value_heads))
        keys, values = key_heads.times(delta.key_dim), heads.times(delta.value_dim)
        channels = keys.then(keys).then(values)
        columns = {
            Role.DELTA_QKV: channels,
            Role.DELTA_Z: values,
            Role.DELTA_B: heads,
            Role.DELTA_A: heads,
            # Files have them by key head.
            Role.DELTA_QKVZ: key_heads.times((channels.size + values.size) // key_heads.size),
            Role.DELTA_BA: key_heads.times(2 * heads.size // key_heads.size),
        }
        for role, rows in columns.items():
            if role in self.names:
                yield self.weight(role, rows, hidden)
        axes = (channels, Axis(1), Axis(delta.width))
        name = f"{self.at}{self.names[Role.DELTA_FILTER]}.weight"
        yield self.spec(Role.DELTA_FILTER, Kind.FILTER, *axes, name=name)
        for role in (Role.DELTA_DECAY, Role.DELTA_STEP):
            yield self.spec(role, Kind.VECTOR, heads)
        yield self.spec(Role.DELTA_NORM, Kind.VECTOR, Axis(delta.value_dim))
        yield self.weight(Role.DELTA_OUTPUT, hidden, values)

    def by_kv_head(self, heads: LayerHeads) -> Axis:
        """Rows of one projection in the order of KV heads: query heads of each, its k, its v."""
        q, kv = self.axes.query_heads, self.axes.kv_heads(heads.num_kv_heads)
        group, size = q.size // kv.size, heads.head_dim
        lines = kv.times((group + 2) * size)
        if kv.part > 1 or q.part == group:
            return lines
        ((start, stop),), ((first, last),) = lines.spans, q.times(size).spans
        before = kv.spans[0][0] * group * size  # rows of earlier KV heads' query heads
        queries = (start + first - before, start + last - before)
        return Axis(lines.size, (queries, (start + group * size, stop)))

    def mlp(self, width: int) -> Iterator[TensorSpec]:
        """`width`: how many times as wide as the model's MLPs it is."""
        config, hidden = self.config, self.hidden
        columns = self.axes.mlp_columns.times(width)
        if Role.GATE in self.names:
            yield self.weight(Role.GATE, columns, hidden, bias=config.mlp_bias)
        fused = config.gated and Role.GATE not in self.names
        rows = columns.then(columns) if fused else columns
        yield self.weight(Role.UP, rows, hidden, bias=config.mlp_bias)
        yield self.weight(Role.DOWN, hidden, columns, bias=config.mlp_bias)

    def experts(self) -> Iterator[TensorSpec]:
        experts, hidden = self.config.experts, self.hidden
        assert experts is not None
        num, columns = Axis(experts.num), self.axes.expert_columns
        yield self.weight(Role.ROUTER, num, hidden, kind=Kind.HEAD, bias=experts.bias)
        if experts.shared_size:
            inner = self.axes.shared_columns
            yield self.weight(Role.SHARED_GATE, inner, hidden)
            yield self.weight(Role.SHARED_UP, inner, hidden)
            yield self.weight(Role.SHARED_DOWN, hidden, inner)
        if experts.shared_gate:
            yield self.weight(Role.SHARED_FACTOR, Axis(1), hidden, kind=Kind.HEAD)
        rows = columns.times(2) if self.names.alternating else columns.then(columns)
        yield self.all_experts(Role.EXPERTS_UP, experts, rows, hidden)
        yield self.all_experts(Role.EXPERTS_DOWN, experts, hidden, columns)
        if experts.beside_mlp:
            for role in (Role.EXPERTS_INPUT_NORM, Role.MLP_NORM, Role.EXPERTS_OUTPUT_NORM):
                yield self.norm(role)
            yield self.spec(Role.ROUTER_SCALE, Kind.VECTOR, hidden)
        if experts.expert_scales:
            yield self.spec(Role.EXPERT_SCALES, Kind.VECTOR, num)
        if experts.correction:
            yield self.spec(Role.CORRECTION, Kind.VECTOR, num)

    def all_experts(self, role: Role, experts: Experts, rows: Axis, columns: Axis) -> TensorSpec:
        name, num, bias = self.at + self.names[role], Axis(experts.num), None
        if experts.bias:
            added = self.added(rows, columns)
            bias = self.spec(role, Kind.BIAS, num, added, name=f"{name}_bias")
        if not experts.mxfp4:
            turned = self.names.alternating
            sides = (columns, rows) if turned else (rows, columns)
            return self.spec(role, Kind.EXPERTS, num, *sides, transposed=turned, bias=bias)
        blocks = columns.over(MX_BLOCK)
        scales = self.spec(role, Kind.POWERS, num, rows, blocks, name=f"{name}_scales")
        axes = (num, rows, blocks, Axis(MX_BLOCK // 2))
        codes = self.spec(role, Kind.CODES, *axes, name=f"{name}_blocks")
        return replace(codes, scales=scales, bias=bias)

    def singles(self, role: Role) -> list[tuple[TensorSpec, ...]]:
        experts, hidden, columns = self.config.experts, self.hidden, self.axes.expert_columns
        assert experts is not None
        parts = {
            Role.EXPERTS_UP: ((Role.EXPERT_GATE, Role.EXPERT_UP), columns, hidden),
            Role.EXPERTS_DOWN: ((Role.EXPERT_DOWN,), hidden, columns),
        }
        roles, rows, inputs = parts[role]
        return [
            tuple(self.weight(one, rows, inputs, bias=experts.bias, expert=index) for one in roles)
            for index in range(experts.num)
        ]

    def norm(self, role: Role, size: Axis | None = None, *, bias: bool = False) -> TensorSpec:
        """A norm over the residual, or over something else of `size`."""
        module, size = self.at + self.names[role], size or self.hidden
        beside = self.spec(role, Kind.BIAS, size, name=f"{module}.bias") if bias else None
        return self.spec(role, Kind.NORM, size, name=f"{module}.weight", bias=beside)

    def weight(
        self,
        role: Role,
        rows: Axis,
        columns: Axis,
        *,
        kind: Kind = Kind.MATRIX,
        bias: bool = False,
        expert: int = 0,
    ) -> TensorSpec:
        """The weight of a module, and its bias. `expert`: the index, where it is one expert's."""
        module = self.at + self.names[role].format(expert)
        turned = kind is Kind.MATRIX and self.names.transposed
        axes = (columns, rows) if turned else (rows, columns)
        beside = None
        if bias:
            beside = self.spec(role, Kind.BIAS, self.added(rows, columns), name=f"{module}.bias")
        return self.spec(role, kind, *axes, module=module, transposed=turned, bias=beside)

    def added(self, rows: Axis, columns: Axis) -> Axis:
        """Of the bias of a weight."""
        return self.axes.of_sum(rows.size) if columns.spans else rows

    def spec(
        self,
        role: Role,
        kind: Kind,
        *axes: Axis,
        name: str | None = None,
        module: str | None = None,
        transposed: bool = False,
        bias: TensorSpec | None = None,
    ) -> TensorSpec:
        """`name`: None: that of the weight of `module`, or of the role."""
        if name is None:
            name = self.at + self.names[role] if module is None else f"{module}.weight"
        shape = tuple(axis.size for axis in axes)
        cut = next((Cut(dim, axis.spans) for dim, axis in enumerate(axes) if axis.spans), None)
        return TensorSpec(name, shape, role, kind, self.layer, cut, module, transposed, bias=bias)

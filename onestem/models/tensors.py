"""The table of a model's tensors. Each is described once: its name in the checkpoint, its shape,
what it is for, and what a rank holds of it.

Checks of files, sizes, random values, updates and cuts for ranks read it; the builder of a decoder
asks it for tensors by their role.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from onestem.models.config import ModelConfig
from onestem.models.cuts import Axis, Cut
from onestem.models.description import ExpertNames, Experts, LayerHeads
from onestem.models.part import Axes
from onestem.models.ranks import ALONE, Ranks
from onestem.ops.experts import MX_BLOCK

__all__ = ["ByRole", "Kind", "Role", "TensorSpec", "Tensors"]


class Role(enum.Enum):
    """What a tensor is for. A layer, or the model around its layers, has at most one of a role."""

    # Of the model.
    EMBEDDING = enum.auto()
    POSITIONS = enum.auto()
    NORM = enum.auto()
    HEAD = enum.auto()
    HEAD_BIAS = enum.auto()  # a tied head has no tensor of its own, but may have a bias
    TOKEN_VECTORS = enum.auto()
    VECTORS_PROJECTION = enum.auto()
    VECTORS_NORM = enum.auto()
    # Of a layer.
    INPUT_NORM = enum.auto()
    OUTPUT_NORM = enum.auto()
    POST_NORM = enum.auto()
    DOWN_NORM = enum.auto()
    QKV = enum.auto()  # or these three
    Q = enum.auto()
    K = enum.auto()
    V = enum.auto()
    Q_NORM = enum.auto()
    K_NORM = enum.auto()
    SINKS = enum.auto()
    OUTPUT = enum.auto()
    GATE = enum.auto()
    UP = enum.auto()  # in a gated MLP without GATE: both, gate first
    DOWN = enum.auto()
    ROUTER = enum.auto()
    CORRECTION = enum.auto()
    ROUTER_SCALE = enum.auto()
    EXPERTS_UP = enum.auto()  # gate and up of all experts
    EXPERTS_DOWN = enum.auto()
    EXPERT_SCALES = enum.auto()
    EXPERTS_INPUT_NORM = enum.auto()
    EXPERTS_OUTPUT_NORM = enum.auto()
    MLP_NORM = enum.auto()  # of what the MLP beside experts returns
    SHARED_GATE = enum.auto()
    SHARED_UP = enum.auto()
    SHARED_DOWN = enum.auto()
    SHARED_FACTOR = enum.auto()  # `ExpertNames.shared_gate`
    VECTORS_GATE = enum.auto()
    VECTORS_OUTPUT = enum.auto()
    VECTORS_OUTPUT_NORM = enum.auto()
    SCALAR = enum.auto()


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
    SCALAR = enum.auto()


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        shape: of the whole tensor: `[rows, width]` of a table, `[out_features, in_features]` of a
            matrix, `[num, out_features, in_features]` of experts (`[num, out_features, blocks, 16]`
            in mxfp4).
        cut: the part that the rank holds; None: all.
        module: the module that has it as its weight, which may be stored in another format, as
            other tensors of the module; None: it is always stored as it is.
        transposed: its last two dimensions stand the other way round.
        scales, bias: the tensors beside a weight; they have its role.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    kind: Kind
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
        self._maker = _Maker(config, ranks)
        self.model: ByRole = {one.role: one for one in self._maker.of_model()}
        self.layers: Sequence[ByRole] = [
            {one.role: one for one in self._maker.of_layer(index)}
            for index in range(config.num_layers)
        ]

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

    def of_experts(self) -> Iterator[tuple[int, TensorSpec]]:
        """(layer, weight of all its experts)."""
        for layer, part in enumerate(self.layers):
            for role in (Role.EXPERTS_UP, Role.EXPERTS_DOWN):
                if role in part:
                    yield layer, part[role]

    def singles(self, layer: int, role: Role) -> list[tuple[TensorSpec, ...]]:
        """For each expert the matrices that stand for its part of a weight of all experts, if they
        are concatenated by rows: most files hold these instead."""
        return self._maker.singles(layer, role)

    @property
    def alternates(self) -> bool:
        """Whether rows of gate and up alternate in a weight of all experts."""
        names = self.config.tensor_names.experts
        return names is not None and names.alternating

    def halves(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Gate and up, `[num, size, ...]` each, of `[num, 2 * size, ...]` of all experts."""
        if self.alternates:
            return tensor[:, 0::2], tensor[:, 1::2]
        return tensor.chunk(2, dim=1)


def _experts_of(config: ModelConfig) -> tuple[Experts, ExpertNames]:
    names = config.tensor_names.experts
    assert config.experts is not None
    assert names is not None
    return config.experts, names


class _Maker:
    """Describes a model's tensors, part by part."""

    def __init__(self, config: ModelConfig, ranks: Ranks) -> None:
        self.config, self.names = config, config.tensor_names
        self.axes = Axes(config, ranks)
        self.hidden = Axis(config.hidden_size)

    def of_model(self) -> Iterator[TensorSpec]:
        config, names, hidden = self.config, self.names, self.hidden
        rows = self.axes.vocabulary
        yield self.weight(Role.EMBEDDING, Kind.TABLE, names.embedding, rows, hidden)
        yield self.norm(Role.NORM, names.norm)
        if names.positions is not None:
            positions = Axis(config.max_position_embeddings)
            yield self.weight(Role.POSITIONS, Kind.TABLE, names.positions, positions, hidden)
        if not config.tie_embeddings:
            yield self.weight(Role.HEAD, Kind.HEAD, names.head, rows, hidden)
        if config.head_bias:
            yield self.spec(Role.HEAD_BIAS, Kind.BIAS, f"{names.head}.bias", rows)
        vectors = names.token_vectors
        if vectors is not None:
            width = Axis(config.num_layers * config.token_vectors)
            yield self.weight(Role.TOKEN_VECTORS, Kind.TABLE, vectors.table, rows, width)
            yield self.matrix(Role.VECTORS_PROJECTION, vectors.projection, width, hidden)
            yield self.vector_norm(Role.VECTORS_NORM, vectors.norm, Axis(config.token_vectors))

    def of_layer(self, index: int) -> Iterator[TensorSpec]:
        config, names = self.config, self.names
        at = names.layer.format(index)
        norms = {
            Role.INPUT_NORM: names.input_norm,
            Role.OUTPUT_NORM: names.output_norm,
            Role.POST_NORM: names.post_norm,
            Role.DOWN_NORM: names.down_norm,
        }
        for role, module in norms.items():
            if module is not None:
                yield self.norm(role, at + module)
        yield from self.attention(at, config.heads[index])
        if config.has_experts(index):
            yield from self.experts(at)
        if config.has_mlp(index):
            yield from self.mlp(at, config.mlp_size(index) // config.intermediate_size)
        vectors = names.token_vectors
        if vectors is not None:
            size = Axis(config.token_vectors)
            yield self.matrix(Role.VECTORS_GATE, at + vectors.gate, size, self.hidden)
            yield self.matrix(Role.VECTORS_OUTPUT, at + vectors.output, self.hidden, size)
            yield self.vector_norm(Role.VECTORS_OUTPUT_NORM, at + vectors.output_norm, self.hidden)
        if names.layer_scalar is not None:
            yield self.spec(Role.SCALAR, Kind.SCALAR, at + names.layer_scalar, Axis(1))

    def attention(self, at: str, heads: LayerHeads) -> Iterator[TensorSpec]:
        config, names, hidden = self.config, self.names, self.hidden
        q = self.axes.query_heads.times(heads.head_dim)
        kv = self.axes.kv_heads(heads.num_kv_heads).times(heads.head_dim)
        if len(names.qkv) == 1:
            rows = self.by_kv_head(heads) if names.grouped else q.then(kv).then(kv)
            yield self.matrix(Role.QKV, at + names.qkv[0], rows, hidden, config.qkv_bias)
        else:
            own = 1 if heads.kv_layer is not None else 2 if heads.value_is_key else 3
            roles = [(Role.Q, q), (Role.K, kv), (Role.V, kv)][:own]
            for (role, rows), module in zip(roles, names.qkv, strict=False):
                yield self.matrix(role, at + module, rows, hidden, config.qkv_bias)
        yield self.matrix(Role.OUTPUT, at + names.output, hidden, q, config.o_bias)
        norms = [(Role.Q_NORM, q), (Role.K_NORM, kv)][: 1 if heads.kv_layer is not None else 2]
        for (role, rows), module in zip(norms, names.qk_norm, strict=False):
            size = rows if config.qk_norm_of_all else Axis(heads.head_dim)
            yield self.vector_norm(role, at + module, size)
        if names.sinks is not None:
            yield self.spec(Role.SINKS, Kind.VECTOR, at + names.sinks, self.axes.query_heads)

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

    def mlp(self, at: str, width: int) -> Iterator[TensorSpec]:
        """`width`: how many times as wide as the model's MLPs it is."""
        config, names, hidden = self.config, self.names, self.hidden
        columns = self.axes.mlp_columns.times(width)
        if config.gated and len(names.up) == 1:
            ups = [(Role.UP, columns.then(columns))]
        else:
            ups = [(Role.GATE, columns), (Role.UP, columns)][-len(names.up) :]
        for (role, rows), module in zip(ups, names.up, strict=True):
            yield self.matrix(role, at + module, rows, hidden, config.mlp_bias)
        yield self.matrix(Role.DOWN, at + names.down, hidden, columns, config.mlp_bias)

    def experts(self, at: str) -> Iterator[TensorSpec]:
        (experts, names), hidden = _experts_of(self.config), self.hidden
        num, columns = Axis(experts.num), self.axes.expert_columns
        router = at + names.router
        yield self.weight(Role.ROUTER, Kind.HEAD, router, num, hidden, bias=experts.bias)
        if experts.shared_size:
            inner = self.axes.shared_columns
            roles = (Role.SHARED_GATE, Role.SHARED_UP)
            for role, module in zip(roles, names.shared_up, strict=True):
                yield self.matrix(role, at + module, inner, hidden)
            yield self.matrix(Role.SHARED_DOWN, at + names.shared_down, hidden, inner)
        if experts.shared_gate:
            yield self.weight(
                Role.SHARED_FACTOR, Kind.HEAD, at + names.shared_gate, Axis(1), hidden
            )
        rows = columns.times(2) if names.alternating else columns.then(columns)
        yield self.all_experts(Role.EXPERTS_UP, at + names.up, rows, hidden)
        yield self.all_experts(Role.EXPERTS_DOWN, at + names.down, hidden, columns)
        if experts.beside_mlp:
            yield self.vector_norm(Role.EXPERTS_INPUT_NORM, at + names.input_norm, hidden)
            yield self.vector_norm(Role.MLP_NORM, at + names.mlp_norm, hidden)
            yield self.vector_norm(Role.EXPERTS_OUTPUT_NORM, at + names.output_norm, hidden)
            yield self.spec(Role.ROUTER_SCALE, Kind.VECTOR, at + names.router_scale, hidden)
        if experts.expert_scales:
            yield self.spec(Role.EXPERT_SCALES, Kind.VECTOR, at + names.expert_scales, num)
        if experts.correction:
            yield self.spec(Role.CORRECTION, Kind.VECTOR, at + names.correction, num)

    def all_experts(self, role: Role, name: str, rows: Axis, columns: Axis) -> TensorSpec:
        experts, names = _experts_of(self.config)
        num, bias = Axis(experts.num), None
        if experts.bias:
            bias = self.spec(role, Kind.BIAS, f"{name}_bias", num, self.added(rows, columns))
        if not experts.mxfp4:
            turned = names.alternating
            axes = (columns, rows) if turned else (rows, columns)
            return self.spec(role, Kind.EXPERTS, name, num, *axes, transposed=turned, bias=bias)
        blocks = columns.over(MX_BLOCK)
        scales = self.spec(role, Kind.POWERS, f"{name}_scales", num, rows, blocks)
        block = Axis(MX_BLOCK // 2)  # bytes
        return self.spec(
            role, Kind.CODES, f"{name}_blocks", num, rows, blocks, block, scales=scales, bias=bias
        )

    def singles(self, layer: int, role: Role) -> list[tuple[TensorSpec, ...]]:
        (experts, names), hidden = _experts_of(self.config), self.hidden
        up, columns = role is Role.EXPERTS_UP, self.axes.expert_columns
        modules = names.each_up if up else (names.each_down,)
        axes = (columns, hidden) if up else (hidden, columns)
        each = self.names.layer.format(layer) + names.each
        return [
            tuple(
                self.matrix(role, each.format(index) + module, *axes, experts.bias)
                for module in modules
            )
            for index in range(experts.num)
        ]

    def norm(self, role: Role, module: str) -> TensorSpec:
        """A norm over the residual."""
        bias = None
        if self.config.norm_bias:
            bias = self.spec(role, Kind.BIAS, f"{module}.bias", self.hidden)
        return self.spec(role, Kind.NORM, f"{module}.weight", self.hidden, bias=bias)

    def vector_norm(self, role: Role, module: str, size: Axis) -> TensorSpec:
        """An RMSNorm over something else, which has no bias."""
        return self.spec(role, Kind.NORM, f"{module}.weight", size)

    def matrix(
        self, role: Role, module: str, rows: Axis, columns: Axis, bias: bool = False
    ) -> TensorSpec:
        return self.weight(role, Kind.MATRIX, module, rows, columns, bias=bias)

    def weight(
        self, role: Role, kind: Kind, module: str, rows: Axis, columns: Axis, *, bias: bool = False
    ) -> TensorSpec:
        transposed = kind is Kind.MATRIX and self.names.transposed
        axes = (columns, rows) if transposed else (rows, columns)
        beside = None
        if bias:
            beside = self.spec(role, Kind.BIAS, f"{module}.bias", self.added(rows, columns))
        return self.spec(
            role,
            kind,
            f"{module}.weight",
            *axes,
            module=module,
            transposed=transposed,
            bias=beside,
        )

    def added(self, rows: Axis, columns: Axis) -> Axis:
        """Of the bias of a weight."""
        return self.axes.of_sum(rows.size) if columns.spans else rows

    def spec(
        self,
        role: Role,
        kind: Kind,
        name: str,
        *axes: Axis,
        module: str | None = None,
        transposed: bool = False,
        scales: TensorSpec | None = None,
        bias: TensorSpec | None = None,
    ) -> TensorSpec:
        cuts = [Cut(dim, axis.spans) for dim, axis in enumerate(axes) if axis.spans]
        shape = tuple(axis.size for axis in axes)
        cut = cuts[0] if cuts else None
        return TensorSpec(name, shape, role, kind, cut, module, transposed, scales, bias)

"""What checkpoints call a model's tensors: values, no torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

# How many names an error spells out before it gives only their number.
NAMES_SHOWN = 4


class Role(enum.Enum):
    """What a tensor is for. A layer, or the model around its layers, has at most one of a role,
    and beside a weight its bias."""

    # Of the model.
    EMBEDDING = enum.auto()
    POSITIONS = enum.auto()  # learned
    NORM = enum.auto()
    HEAD = enum.auto()
    HEAD_BIAS = enum.auto()  # a tied head has no weight, but may have a bias
    TOKEN_VECTORS = enum.auto()  # vectors of all layers, side by side
    VECTORS_PROJECTION = enum.auto()  # of embeddings; its result is added to the vectors
    VECTORS_NORM = enum.auto()  # of the projection's result, for each layer

    # Of a layer. Norms before attention and before the MLP: without INPUT_NORM attention reads the
    # residual itself; without POST_NORM the MLP reads what attention reads, or in a sequential
    # block the residual. Norms of the results of both, before they are added.
    INPUT_NORM = enum.auto()
    POST_NORM = enum.auto()
    OUTPUT_NORM = enum.auto()
    DOWN_NORM = enum.auto()
    QKV = enum.auto()  # or these three
    Q = enum.auto()
    K = enum.auto()
    V = enum.auto()
    Q_NORM = enum.auto()
    K_NORM = enum.auto()
    SINKS = enum.auto()
    OUTPUT = enum.auto()  # of attention
    # Of a layer with the delta rule: q, k and v, the gate z, and what beta and the decay are made
    # of; or both pairs fused, by key head.
    DELTA_QKV = enum.auto()
    DELTA_Z = enum.auto()
    DELTA_B = enum.auto()
    DELTA_A = enum.auto()
    DELTA_QKVZ = enum.auto()
    DELTA_BA = enum.auto()
    DELTA_FILTER = enum.auto()  # of the convolution
    DELTA_DECAY = enum.auto()  # logarithm of each value head's rate
    DELTA_STEP = enum.auto()  # added to a before softplus
    DELTA_NORM = enum.auto()  # over each value head
    DELTA_OUTPUT = enum.auto()
    GATE = enum.auto()
    UP = enum.auto()  # in a gated MLP without GATE: both, gate first
    DOWN = enum.auto()
    SCALAR = enum.auto()  # factor of the layer's result, the residual included
    VECTORS_GATE = enum.auto()
    VECTORS_OUTPUT = enum.auto()
    VECTORS_OUTPUT_NORM = enum.auto()

    # Of a layer with experts.
    ROUTER = enum.auto()
    ROUTER_SCALE = enum.auto()
    CORRECTION = enum.auto()
    EXPERTS_UP = enum.auto()  # gate and up of all experts
    EXPERTS_DOWN = enum.auto()
    EXPERT_GATE = enum.auto()  # of one expert, which a file may hold instead
    EXPERT_UP = enum.auto()
    EXPERT_DOWN = enum.auto()
    EXPERT_SCALES = enum.auto()
    EXPERTS_INPUT_NORM = enum.auto()  # of what experts read
    EXPERTS_OUTPUT_NORM = enum.auto()  # of what they return
    MLP_NORM = enum.auto()  # of what the MLP beside them returns
    SHARED_GATE = enum.auto()
    SHARED_UP = enum.auto()
    SHARED_DOWN = enum.auto()
    SHARED_FACTOR = enum.auto()  # `Experts.shared_gate`


# Of their few rows decays are made, which every later token of a state feels: they are not rounded
# when they are loaded.
RATES = (Role.DELTA_A, Role.DELTA_B, Role.DELTA_BA)


@dataclass(frozen=True)
class TensorNames:
    """Names in a checkpoint.

    Attributes:
        names: of modules, whose tensors are `.weight` and `.bias`, or of tensors: sinks, scalars,
            scales, the router's correction, vectors of the delta rule, and weights of all experts,
            with the suffixes `_bias`, and for mxfp4 `_blocks` and `_scales`. Names of one expert
            have a place for its index.
        layer: what names within a layer begin with, with a place for its index.
        prefix: of all names; a checkpoint of the model without its head leaves it out.
        transposed: whether weights of linear layers are `[in_features, out_features]`.
        grouped: rows of the single projection are ordered by KV head: its query heads, its k, its
            v. Otherwise all q, all k, all v.
        alternating: rows of gate and up of all experts alternate, and weights of all experts are
            transposed except in mxfp4. Otherwise gate, then up.
        renamed: (prefix of a name in some checkpoints, the prefix here).
        ignored: suffixes of names of buffers that follow from the configuration.
        beside: prefixes of names of parts that are not computed, like an image encoder's.
    """

    names: Mapping[Role, str]
    layer: str
    prefix: str
    transposed: bool = False
    grouped: bool = False
    alternating: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    beside: tuple[str, ...] = ()

    def __getitem__(self, role: Role) -> str:
        return self.names[role]

    def __contains__(self, role: Role) -> bool:
        return role in self.names

    def ours(self, name: str) -> str | None:
        """The name here of a tensor, which some checkpoints call otherwise. None: it belongs to a
        part that is not computed. The common prefix of all names is ignored."""
        if name.startswith(self.beside):
            return None
        for theirs, ours in self.renamed:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name


def listed(names: list[str]) -> str:
    """Names for an error: the first few, and how many there are."""
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown}, ... ({len(names)} in all)"

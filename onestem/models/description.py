"""What a decoder is made of: values, no torch.

Each module of `onestem.models.families` reads them from its family's `config.json`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

from onestem.errors import ConfigError

MAX_WINDOW = 2**31 - 1  # plans of attention have it in 32 bits


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE frequencies are stretched for long contexts, independent of the prompt's length.

    `linear` divides every frequency by `factor`. `llama3` divides those whose wavelength is longer
    than `original_max_position_embeddings / low_freq_factor`, keeps those shorter than
    `original_max_position_embeddings / high_freq_factor` and interpolates between the two.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071, section 3.2).

    Frequencies of pairs that turn less than `beta_slow` times within
    `original_max_position_embeddings` are divided by `factor`. Pairs that turn more than
    `beta_fast` times keep theirs, and a ramp covers the pairs between.

    Attributes:
        attention_factor: factor of cosines and sines (the paper's `sqrt(1/t)`).
        truncate: whether the ramp begins and ends at whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv 2402.13753): each pair's frequency is divided by a factor of its own.

    The factors are `long` where the model has more positions than
    `original_max_position_embeddings`, else `short`. They are the same for all prompts, so that
    prompts of any length can share KV.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


@dataclass(frozen=True)
class Proportional:
    """Only the first `pairs` pairs turn, at their usual frequencies divided by `factor`; the others
    stay (Gemma 4)."""

    pairs: int
    factor: float = 1.0


@dataclass(frozen=True)
class Rotary:
    """RoPE (arXiv 2104.09864) over the first `dim` dimensions of each head; the others stay.

    `interleaved`: pair i is (x[2i], x[2i + 1]); otherwise (x[i], x[i + dim / 2]).
    """

    dim: int
    theta: float = 10000.0
    scaling: RopeScaling | Yarn | LongRope | Proportional | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class LayerRotary:
    """RoPE by layer; None: the layer has none."""

    layers: tuple[Rotary | None, ...]


@dataclass(frozen=True)
class LayerHeads:
    """Keys and values of a layer, and the size of its heads.

    Attributes:
        kv_layer: an earlier layer whose keys and values this one reads, with as many heads of the
            same size; None: its own.
        value_is_key: values are not projected: they are the keys before norm and rotation.
    """

    num_kv_heads: int
    head_dim: int
    kv_layer: int | None = None
    value_is_key: bool = False


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """The gated delta rule (arXiv 2412.06464) in place of attention: a layer keeps a state of fixed
    size for a sequence, and no keys and values.

    Attributes:
        layers: per layer, whether it has this in place of attention.
        num_key_heads, num_value_heads: a key head, with its query, serves as many consecutive value
            heads as there are for each.
        key_dim, value_dim: sizes of these heads.
        width: rows that the convolution over q, k and v sees, its own included.
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"linear_num_value_heads is {self.num_value_heads}, expected a multiple of "
                f"linear_num_key_heads ({self.num_key_heads})"
            )
        if self.width < 2:
            raise ConfigError(f"linear_conv_kernel_dim is {self.width}, expected at least 2")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Columns of q, k and v."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Columns of q, k and v together."""
        return sum(self.sizes)

    @property
    def columns(self) -> int:
        """Columns of all of a layer's products, its output's inputs among them."""
        return self.channels + 2 * self.sizes[2] + 2 * self.num_value_heads

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of one state of all layers: the last inputs of the convolution, in the model's
        dtype of `itemsize` bytes, and a float32 matrix for each value head."""
        matrices = 4 * self.num_value_heads * self.key_dim * self.value_dim
        return sum(self.layers) * ((self.width - 1) * self.channels * itemsize + matrices)


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at position p are multiplied by `1 + beta * ln(1 + floor(p / positions))`, for long
    contexts (Llama 4, Ministral 3)."""

    beta: float
    positions: int


@dataclass(frozen=True)
class Alibi:
    """Linear biases (arXiv 2108.12409): `slopes[head] * (p_key - p_row)` on the scores."""

    slopes: tuple[float, ...]

    @staticmethod
    def of_heads(num_heads: int, bias_max: float = 8.0) -> Alibi:
        """The paper's slopes (section 3).

        For a power of two of heads `2 ** (-bias_max i / heads)`, with i from 1. For other numbers
        the slopes of the power of two below, then every second one of the power above.
        """
        power = 2 ** int(math.log2(num_heads))
        slopes = [2 ** (-bias_max * i / power) for i in range(1, power + 1)]
        between = [2 ** (-bias_max * i / (2 * power)) for i in range(1, 2 * power, 2)]
        return Alibi(tuple((slopes + between)[:num_heads]))


@dataclass(frozen=True)
class Learned:
    """A vector per position, added to the token's embedding."""


@dataclass(frozen=True)
class ClampedSwiglu:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, with `gate` clamped to at most `limit` and `up` to
    `-limit..limit` (gpt-oss)."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Gated MLPs of which each row takes a few, by the scores of a router.

    A row takes the `top_k` experts of the highest scores. Its result is the sum of theirs, each
    times its score.

    Attributes:
        num: number of experts.
        top_k: experts that a row takes.
        intermediate_size: of one expert.
        layers: per layer, whether it has experts; others have an MLP of
            `Description.intermediate_size`.
        scores: function of the router's logits, over all experts.
        normalized: whether a row's `top_k` scores are divided by their sum.
        scale: factor of these scores.
        correction: whether a number for each expert is added to the scores to choose experts.
        num_groups, top_groups: experts form `num_groups` groups of equal size. A row chooses among
            the `top_groups` groups whose two best scores have the highest sum.
        shared_size: size of an MLP that every row also takes; 0: there is none.
        shared_gate: whether its result is multiplied by the sigmoid of a product of the row.
        bias: whether the router and the experts' products have biases.
        clamp: activation of the experts; None: that of the layers' MLP.
        mxfp4: whether files hold experts in four bits.
        beside_mlp: layers with experts have the MLP too (Gemma 4). Experts read the residual
            through a norm of their own, the router through one without weights, times a vector.
            The results of both branches are normed before they are added.
        expert_scales: whether each expert's result is multiplied by a number, after `normalized`.
    """

    num: int
    top_k: int
    intermediate_size: int
    layers: tuple[bool, ...]
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scale: float = 1.0
    correction: bool = False
    num_groups: int = 1
    top_groups: int = 1
    shared_size: int = 0
    shared_gate: bool = False
    bias: bool = False
    clamp: ClampedSwiglu | None = None
    mxfp4: bool = False
    beside_mlp: bool = False
    expert_scales: bool = False

    def __post_init__(self) -> None:
        if self.num % self.num_groups:
            raise ConfigError(f"{self.num} experts do not divide into {self.num_groups} groups")
        if not 0 < self.top_groups <= self.num_groups:
            raise ConfigError(
                f"a row takes experts of {self.top_groups} groups, there are {self.num_groups}"
            )
        if self.num_groups > 1 and self.num < 2 * self.num_groups:
            raise ConfigError("a group has one expert, expected two or more: groups go by two")
        among = self.num // self.num_groups * self.top_groups
        if not 0 < self.top_k <= among:
            raise ConfigError(f"num_experts_per_tok is {self.top_k}, expected 1 to {among}")


@dataclass(frozen=True, kw_only=True)
class Description:
    """A decoder-only transformer.

    Attributes:
        architecture: name in `config.json`.
        norm: RMSNorm or LayerNorm.
        norm_bias: whether norms have a bias.
        norm_offset: added to the stored weights of norms (Gemma: 1).
        block: `sequential`: the MLP reads the residual after attention. `parallel`: both read the
            same normed rows. `parallel_two_norms`: the same rows, each through a norm of its own.
        mlp: `silu_gated`: down(silu(gate) * up); `gelu_tanh_gated` likewise. Others:
            down(gelu(up)), by the error function or its approximation with tanh.
        embedding_scale: factor of token embeddings, rounded to the weights' dtype.
        residual_scale: factor of what attention and the MLP add.
        score_scale: factor of query times key; None: `1 / sqrt(head_dim)`.
        score_softcap, logit_softcap: x becomes `cap * tanh(x / cap)`; None: unchanged.
        logit_scale: factor of logits, before the softcap.
        query_growth: how queries grow with their position; None: they do not.
        qkv_clip: q, k and v are clamped to `-qkv_clip..qkv_clip`.
        qk_norm: RMSNorm over `head_dim` of every query and key head, before RoPE.
        qk_norm_of_all: RMSNorm over all query heads at once, and over all key heads.
        v_norm: RMSNorm over every value head, without a weight.
        layer_heads: keys and values of each layer; None: as `num_kv_heads` and `head_dim` say.
        delta: in place of attention in some layers; None: all layers have attention.
        output_gate: what attention returns is multiplied by the sigmoid of as many further columns
            of the query projection, which follow each head's.
        wide_mlps: layers whose MLP is twice as wide.
        token_vectors: size of the vectors that each layer has for each token of the vocabulary
            and adds after the MLP (Gemma 3n and 4: per-layer embeddings); 0: none.
        sinks: each query head has one more logit in its softmax, of a key without a value.
        experts: in place of the MLP, or beside it, in some layers.
        max_position_embeddings: position ids are lower than this.
        sliding_windows: per layer, the number of positions that a row sees, itself included
            (0 <= p_row - p_key < window); `None`: all.
        initializer_range: standard deviation of random weights.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    positions: Rotary | LayerRotary | Alibi | Learned
    max_position_embeddings: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_bias: bool = False
    norm_offset: float = 0.0
    block: Literal["sequential", "parallel", "parallel_two_norms"] = "sequential"
    mlp: Literal["silu_gated", "gelu_tanh_gated", "gelu", "gelu_tanh"] = "silu_gated"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    score_scale: float | None = None
    score_softcap: float | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    query_growth: QueryGrowth | None = None
    qkv_clip: float | None = None
    qk_norm: bool = False
    qk_norm_of_all: bool = False
    v_norm: bool = False
    layer_heads: tuple[LayerHeads, ...] | None = None
    delta: DeltaRule | None = None
    output_gate: bool = False
    wide_mlps: frozenset[int] = frozenset()
    token_vectors: int = 0
    sinks: bool = False
    experts: Experts | None = None
    sliding_windows: tuple[int | None, ...]
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        longest = max((window or 0 for window in self.sliding_windows), default=0)
        if longest > MAX_WINDOW:
            raise ConfigError(f"sliding_window is {longest}, limit is {MAX_WINDOW}")
        for layers in (self.sliding_windows, self.rotaries, self.heads):
            if len(layers) != self.num_layers:
                raise ConfigError(
                    f"layer_types gives {len(layers)} layers, expected {self.num_layers}"
                )
        for index, heads in enumerate(self.heads):
            self._check_heads(index, heads)
        for heads, rotary in zip(self.heads, self.rotaries, strict=True):
            self._check_rotary(heads, rotary)

    def _check_heads(self, index: int, heads: LayerHeads) -> None:
        if self.num_q_heads % heads.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads is {self.num_q_heads}, expected a multiple of "
                f"num_key_value_heads ({heads.num_kv_heads})"
            )
        if heads.head_dim % 2:
            raise ConfigError(f"head_dim is {heads.head_dim}, expected an even number (RoPE pairs)")
        if heads.kv_layer is None:
            return
        read = self.heads[heads.kv_layer]
        if (read.num_kv_heads, read.head_dim) != (heads.num_kv_heads, heads.head_dim):
            raise ConfigError(
                f"layer {index} has {heads.num_kv_heads} KV heads of {heads.head_dim} and reads "
                f"layer {heads.kv_layer}'s, which has {read.num_kv_heads} of {read.head_dim}"
            )

    def _check_rotary(self, heads: LayerHeads, rotary: Rotary | None) -> None:
        if rotary is None:
            return
        if rotary.dim % 2:
            raise ConfigError(
                f"partial_rotary_factor turns {rotary.dim} of {heads.head_dim} dimensions, "
                "expected an even number (RoPE pairs)"
            )
        if isinstance(rotary.scaling, LongRope):
            for name in ("short", "long"):
                count = len(getattr(rotary.scaling, name))
                if count != rotary.dim // 2:
                    expected = f"expected {rotary.dim // 2} (RoPE pairs)"
                    raise ConfigError(f"{name}_factor has {count} numbers, {expected}")

    @property
    def sees_distances(self) -> bool:
        """Whether nothing but the distance of two tokens counts, where one sees the other: keys and
        values of tokens that see each other alone then serve any position."""
        is_relative = self.query_growth is None and self.delta is None
        return is_relative and not isinstance(self.positions, Learned)

    @property
    def asks_for_places(self) -> bool:
        """Whether a window or slopes ask where a key is, besides how it is turned."""
        return isinstance(self.positions, Alibi) or any(self.sliding_windows)

    @property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        """Each layer's RoPE; None: it has none."""
        if isinstance(self.positions, LayerRotary):
            return self.positions.layers
        rotary = self.positions if isinstance(self.positions, Rotary) else None
        return (rotary,) * self.num_layers

    @property
    def heads(self) -> tuple[LayerHeads, ...]:
        """Heads of each layer."""
        same = LayerHeads(self.num_kv_heads, self.head_dim)
        return (same,) * self.num_layers if self.layer_heads is None else self.layer_heads

    @property
    def head_shapes(self) -> tuple[tuple[int, int], ...]:
        """(head size, query heads per KV head), each pair once."""
        pairs = ((one.head_dim, self.num_q_heads // one.num_kv_heads) for one in self.heads)
        return tuple(dict.fromkeys(pairs))

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """For each layer, the one whose keys and values it reads: itself, or an earlier one."""
        read = (heads.kv_layer for heads in self.heads)
        return tuple(own if layer is None else layer for own, layer in enumerate(read))

    def mlp_size(self, layer: int) -> int:
        """Columns of a layer's MLP."""
        return self.intermediate_size * (2 if layer in self.wide_mlps else 1)

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP: without experts, or beside them."""
        return not self.has_experts(layer) or (self.experts is not None and self.experts.beside_mlp)

    def has_state(self, layer: int) -> bool:
        """Whether a layer has the delta rule in place of attention."""
        return self.delta is not None and self.delta.layers[layer]

    def keeps_kv(self, layer: int) -> bool:
        """Whether a layer stores keys and values: it has attention, and reads no other layer's."""
        return self.heads[layer].kv_layer is None and not self.has_state(layer)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its upward projection."""
        return self.mlp.endswith("_gated")

    def first_layers(self, count: int) -> Self:
        """This description with the first `count` layers alone."""
        positions = self.positions
        if isinstance(positions, LayerRotary):
            positions = LayerRotary(positions.layers[:count])
        windows, experts = self.sliding_windows[:count], self.experts
        if experts is not None:
            experts = replace(experts, layers=experts.layers[:count])
        heads = None if self.layer_heads is None else self.layer_heads[:count]
        delta = self.delta and replace(self.delta, layers=self.delta.layers[:count])
        return replace(
            self,
            num_layers=count,
            sliding_windows=windows,
            positions=positions,
            experts=experts,
            layer_heads=heads,
            delta=delta,
        )

    def without_experts(self) -> Self:
        """This description with MLPs as large as all that a row takes in a layer with experts."""
        if self.experts is None:
            return self
        size = self.experts.top_k * self.experts.intermediate_size + self.experts.shared_size
        size += self.intermediate_size if self.experts.beside_mlp else 0
        return replace(self, experts=None, intermediate_size=size)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers in one token's keys and values over all layers."""
        return sum(
            2 * heads.num_kv_heads * heads.head_dim
            for layer, heads in enumerate(self.heads)
            if self.keeps_kv(layer)
        )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts, in place of the MLP or beside it."""
        return self.experts is not None and self.experts.layers[layer]

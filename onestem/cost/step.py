"""Seconds of a step: linear layers, attention, sampling, host.

A step has a row for each sequence that decodes, and the rows of prompts' chunks. Its seconds are

    linear layers   max(2 * parameters * rows / rate(rows), parameter bytes / bandwidth); the same
                    for each expert that some row takes, over its rows. A prompt's row counts
                    without the last layer's end
    attention       for each run, its keys and values walked once for all rows that see it:
                    max(FLOPs / rate(rows * query heads per KV head), bytes / bandwidth);
                    for each row, its queries, outputs and merged states: bytes / bandwidth.
                    A layer with a window walks what that leaves
    sampling        the head's product with its draws, over rows that sample, as linear layers
    host            a constant each for a step, a row that decodes, a prompt's token, a request

With bytes alone, attention is RelayAttention's eq. 8 to 10 (section 3.4): `attention` with and
without sharing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, TypeVar

from onestem.cost.rates import Rates
from onestem.cost.work import FloatArray

if TYPE_CHECKING:
    from onestem.models.config import ModelConfig

# Passes over a row's queries or outputs. A row reads its queries and writes its output (eq. 8). A
# run that is walked apart adds the same, and its state is read. The first such run adds two more:
# the row's own state is read too, and its output is written again (eq. 9: 7 in all).
UNMERGED, FIRST_MERGED, MERGED = 2, 5, 3

Number = TypeVar("Number", float, FloatArray)

MXFP4_BYTES = 17 / 32  # of a weight: four bits, and eight bits of scale for 32 weights


@dataclass(frozen=True)
class ExpertShape:
    """Experts of a model.

    Attributes:
        layers: number of layers with experts.
        num, top_k: experts in a layer, and how many a row takes.
        parameters: of one expert.
        weight_bytes: bytes of a parameter.
    """

    layers: int
    num: int
    top_k: int
    parameters: int
    weight_bytes: float

    def touched(self, rows: float) -> float:
        """Expected experts of a layer that some row takes, if all are equally likely."""
        return self.num * (1 - (1 - self.top_k / self.num) ** rows)

    @property
    def num_bytes(self) -> float:
        """Bytes of all experts."""
        return self.layers * self.num * self.parameters * self.weight_bytes


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that its costs depend on.

    Attributes:
        layer_parameters: parameters of all layers' products, without experts.
        hidden_size, vocab_size: the head's product.
        num_layers, num_q_heads, num_kv_heads, head_dim: attention.
        itemsize: bytes of a weight, and of an element of a key or value.
        experts: None: there are none.
        layer_heads: each layer's KV heads, head size, and whether it has keys and values of its
            own; None: all layers are alike.
        windows: each layer's sliding window in tokens (None: it has none), or None: no layer has.
        state_bytes: of the recurrent state of one sequence; 0: layers keep none.
        prompt_share: share of the layers' products that a prompt's row goes through. After the last
            layer's attention only rows whose results are read go on.
    """

    layer_parameters: int
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    experts: ExpertShape | None = None
    layer_heads: tuple[tuple[int, int, bool], ...] | None = None
    windows: tuple[int | None, ...] | None = None
    state_bytes: int = 0
    prompt_share: float = 1.0

    @staticmethod
    def of(config: ModelConfig, itemsize: int, *, on_gpu: bool = True) -> ModelShape:
        """The shape of a config, without biases and norms.

        Args:
            on_gpu: weights of four bits keep their format.
        """
        wide, experts, shape = 3 if config.gated else 2, config.experts, None
        columns, rule = 3 * config.num_layers * config.token_vectors, config.delta
        for layer, heads in enumerate(config.heads):
            projected = 0 if heads.kv_layer is not None else 1 if heads.value_is_key else 2
            count = (2 + config.output_gate) * config.num_q_heads + projected * heads.num_kv_heads
            columns += rule.columns if rule and rule.layers[layer] else count * heads.head_dim
            columns += wide * config.mlp_size(layer) if config.has_mlp(layer) else 0
        if experts is not None:
            layers = sum(experts.layers)
            columns += layers * (wide * experts.shared_size + experts.num)
            shape = ExpertShape(
                layers=layers,
                num=experts.num,
                top_k=experts.top_k,
                parameters=wide * config.hidden_size * experts.intermediate_size,
                weight_bytes=MXFP4_BYTES if experts.mxfp4 and on_gpu else itemsize,
            )
        # Columns that a row takes, and those of them after the last layer's attention.
        last, taken = config.num_layers - 1, columns
        after = config.num_q_heads * config.heads[last].head_dim
        after += wide * config.mlp_size(last) if config.has_mlp(last) else 0
        if experts is not None:
            each = experts.top_k * wide * experts.intermediate_size
            taken += sum(experts.layers) * each
            after += experts.layers[last] * (each + wide * experts.shared_size + experts.num)
        of_layers = [
            (0, 0, False)
            if config.has_state(layer)
            else (one.num_kv_heads, one.head_dim, one.kv_layer is None)
            for layer, one in enumerate(config.heads)
        ]
        return ModelShape(
            layer_parameters=config.hidden_size * columns,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_layers=config.num_layers,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            itemsize=itemsize,
            experts=shape,
            layer_heads=tuple(of_layers) if config.layer_heads or rule else None,
            state_bytes=0 if rule is None else rule.state_bytes(itemsize),
            windows=config.sliding_windows if any(config.sliding_windows) else None,
            prompt_share=1 - after / taken,
        )

    @property
    def _heads(self) -> tuple[tuple[int, int, bool], ...]:
        alike = (self.num_kv_heads, self.head_dim, True)
        return self.layer_heads or (alike,) * self.num_layers

    @property
    def _read_values(self) -> int:
        """Elements of a token's keys, over all layers that read them."""
        return sum(count * size for count, size, _ in self._heads)

    @property
    def group(self) -> float:
        """Query heads that share a KV head; if layers differ, the mean weighted by bytes read."""
        return self.num_q_heads * sum(size for _, size, _ in self._heads) / self._read_values

    @cached_property
    def _shares(self) -> dict[int | None, float]:
        """Share of what layers read that those with each window do, as if there were none."""
        shares: dict[int | None, float] = {}
        for window, (count, size, _) in zip(self.windows or (), self._heads, strict=True):
            shares[window] = shares.get(window, 0.0) + count * size / self._read_values
        return shares

    def seen(self, tokens: float, below: float = 0.0) -> float:
        """How many of a run's tokens a row sees in a layer: the mean, weighted by bytes read.

        Args:
            below: tokens between the run and the row.
        """
        if self.windows is None:
            return tokens
        return sum(
            share * (tokens if window is None else min(tokens, max(0.0, window - below)))
            for window, share in self._shares.items()
        )

    @property
    def weight_bytes(self) -> float:
        """Bytes of the layers' and the head's weights."""
        dense = (self.layer_parameters + self.hidden_size * self.vocab_size) * self.itemsize
        return dense + (0 if self.experts is None else self.experts.num_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values, as they are stored."""
        return 2 * sum(count * size * own for count, size, own in self._heads) * self.itemsize

    @property
    def read_bytes(self) -> int:
        """Bytes of a token's keys and values, as layers read them: some read another layer's."""
        return 2 * self._read_values * self.itemsize

    @property
    def token_flops(self) -> float:
        """FLOPs of one query head's two products with a token's keys and values, over all layers
        and KV heads; a row has `group` times as many."""
        return 4.0 * self._read_values

    @property
    def query_bytes(self) -> int:
        """Bytes of a row's queries over all layers; its outputs have as many."""
        return self.num_q_heads * sum(size for _, size, _ in self._heads) * self.itemsize


@dataclass(frozen=True)
class StepCost:
    """Seconds of the parts of a step, for a model on a device.

    Attributes:
        shared: a run is walked once for all rows that see it; False: once for each row
            (`share="storage"`).
    """

    shape: ModelShape
    rates: Rates
    shared: bool = True

    def linear(self, rows: float) -> float:
        """Seconds of the layers' products."""
        if rows <= 0:
            return 0.0
        parameters, experts = self.shape.layer_parameters, self.shape.experts
        seconds = self.rates.linear.seconds(
            2.0 * parameters, parameters * self.shape.itemsize, rows
        )
        if experts is not None:
            touched = experts.touched(rows)
            some = experts.layers * touched * experts.parameters
            seconds += self.rates.linear.seconds(
                2.0 * some, some * experts.weight_bytes, rows * experts.top_k / touched
            )
        return seconds

    def sampling(self, rows: float) -> float:
        """Seconds of logits and draws of `rows` rows."""
        if rows <= 0:
            return 0.0
        weights = self.shape.hidden_size * self.shape.vocab_size
        return self.rates.head.seconds(2.0 * weights, weights * self.shape.itemsize, rows)

    @cached_property
    def walk(self) -> Callable[[float], float]:
        """Function of rows: seconds per token of a run that is walked once for all of them."""
        flops, num_bytes = self.shape.token_flops, self.shape.read_bytes
        group, seconds = self.shape.group, self.rates.attention.seconds

        @lru_cache(maxsize=1 << 16)
        def walk(rows: float) -> float:
            return seconds(flops, num_bytes, rows * group)

        return walk

    @cached_property
    def pass_seconds(self) -> float:
        """Seconds of a pass over a row's queries or outputs."""
        return self.shape.query_bytes / self.rates.attention.bytes

    @property
    def own_walk_seconds(self) -> float:
        """Seconds of a decode's walk over its own run, in all layers, besides its tokens."""
        return self.shape.num_layers * self.rates.walk_seconds + self.passes(UNMERGED)

    def passes(self, count: float) -> float:
        """Seconds of `count` passes."""
        return count * self.pass_seconds

    def run(self, tokens: float, rows: int, *, first: bool = True, below: float = 0.0) -> float:
        """Seconds of a run that `rows` decodes see above their own tokens. It is walked once, and a
        state of each row is merged; if reading it for each row is faster, an implementation does
        that (`ops/work`).

        Args:
            first: no run is above it.
            below: tokens of a row that are below the run.
        """
        tokens = self.shape.seen(tokens, below)
        apart = rows * tokens * self.walk(1)
        if rows <= 1 or not self.shared:
            return apart
        merged = rows * self.passes(FIRST_MERGED if first else MERGED)
        return min(apart, tokens * self.walk(rows) + merged)

    def attention(self, runs: list[tuple[int, int]], own: float, rows: int) -> float:
        """Seconds of `rows` decodes with `own` tokens each, below `runs`: (tokens, rows) of each
        run, the first on top."""
        seconds, below = 0.0, float(own)
        for i, (tokens, seeing) in reversed(list(enumerate(runs))):
            seconds += self.run(tokens, seeing, first=i == 0, below=below)
            below += tokens
        return seconds + rows * (self.shape.seen(own) * self.walk(1) + self.own_walk_seconds)

    def host(self, decodes: Number, tokens: Number, requests: Number) -> Number:
        """Host seconds of a step, or of each of some steps: rows that decode, prompt tokens, and
        requests that end."""
        rates = self.rates
        return (
            rates.step_seconds
            + decodes * rates.row_seconds
            + tokens * rates.token_seconds
            + requests * rates.request_seconds
        )

    def step(self, device: float, host: float) -> float:
        """Seconds of a step, from those of device and host."""
        return max(device, host) if self.rates.overlaps else device + host

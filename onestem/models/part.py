"""The part of a model that each rank holds, where several ranks hold it together.

A rank's part is the description of a smaller model: some of the heads, of the MLPs' columns and of
the vocabulary, and everything else whole. Its tensors have the names of the whole model's; each is
a `Cut` of the tensor there (`TensorSpec.cut`).

Query heads and those of the delta rule divide evenly. KV heads that are fewer than the ranks are
held by several. Columns of MLPs and experts divide by units, so that no group that shares a scale
is cut; ranks may differ by one unit. All ranks have the same number of vocabulary rows; the last
may be zeros. Norms, routers, learned positions and the use of vectors of tokens are whole on each
rank. Biases that are added after a sum belong to rank 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onestem.errors import ConfigError
from onestem.models.config import ModelConfig
from onestem.models.cuts import Axis, Span
from onestem.models.description import Alibi
from onestem.models.ranks import Ranks
from onestem.ops.experts import MX_BLOCK

UNITS = (32, 16)  # columns: int4's products take multiples of the first, fp8's of the second
MANY = 64  # maximum number of ranks that an error suggests


def part_of(config: ModelConfig, ranks: Ranks) -> ModelConfig:
    """The configuration of a rank's part; `config` itself for a single rank.

    Raises:
        ConfigError: names what does not divide, and the numbers of ranks that work.
    """
    if ranks.size == 1:
        return config
    wrong = _indivisible(config, ranks.size)
    if wrong is not None:
        several = ", ".join(map(str, sizes_of(config)))
        raise ConfigError(
            f"{wrong} does not divide over {ranks.size} devices: "
            f"tensor_parallel_size can be {several} for this model"
        )
    axes = Axes(config, ranks)
    positions = config.positions
    if isinstance(positions, Alibi):
        ((first, last),) = axes.query_heads.spans
        positions = Alibi(positions.slopes[first:last])
    heads = config.layer_heads
    if heads is not None:
        heads = tuple(
            replace(one, num_kv_heads=axes.kv_heads(one.num_kv_heads).part) for one in heads
        )
    experts = config.experts
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=axes.expert_columns.part,
            shared_size=axes.shared_columns.part,
        )
    delta = config.delta
    if delta is not None:
        delta = replace(
            delta,
            num_key_heads=axes.even(delta.num_key_heads).part,
            num_value_heads=axes.even(delta.num_value_heads).part,
        )
    return replace(
        config,
        vocab_size=axes.vocabulary.part,
        num_q_heads=axes.query_heads.part,
        num_kv_heads=axes.kv_heads(config.num_kv_heads).part,
        intermediate_size=axes.mlp_columns.part,
        positions=positions,
        layer_heads=heads,
        experts=experts,
        delta=delta,
    )


def sizes_of(config: ModelConfig) -> list[int]:
    """Numbers of ranks that a model divides over, up to `MANY`."""
    return [size for size in range(1, MANY + 1) if _indivisible(config, size) is None]


def _indivisible(config: ModelConfig, size: int) -> str | None:
    """The dimension that does not divide over `size` ranks; None: all do."""
    if config.delta is not None and config.delta.num_key_heads % size:
        return f"linear_num_key_heads ({config.delta.num_key_heads})"
    if config.num_q_heads % size:
        return f"num_attention_heads ({config.num_q_heads})"
    for count in dict.fromkeys(heads.num_kv_heads for heads in config.heads):
        if count % size and size % count:
            return f"num_key_value_heads ({count})"
    if any(map(config.has_mlp, range(config.num_layers))) and config.intermediate_size < size:
        return f"intermediate_size ({config.intermediate_size})"
    experts = config.experts
    if experts is None:
        return None
    if experts.mxfp4 and experts.intermediate_size < size * MX_BLOCK:
        blocks = f"blocks of {MX_BLOCK}: mxfp4"
        return f"the experts' intermediate_size ({experts.intermediate_size} in {blocks})"
    if experts.intermediate_size < size:
        return f"the experts' intermediate_size ({experts.intermediate_size})"
    if 0 < experts.shared_size < size:
        return f"the shared expert's intermediate_size ({experts.shared_size})"
    return None


@dataclass(frozen=True)
class Axes:
    """The dimensions that ranks divide, each with the spans that one rank has."""

    config: ModelConfig
    ranks: Ranks

    @property
    def vocabulary(self) -> Axis:
        """Rows of embedding and head. The last rank's span may be longer."""
        rows = -(-self.config.vocab_size // self.ranks.size)
        return self._axis(
            self.config.vocab_size, (self.ranks.rank * rows, (self.ranks.rank + 1) * rows)
        )

    @property
    def query_heads(self) -> Axis:
        """Query heads of every layer."""
        return self.even(self.config.num_q_heads)

    def even(self, count: int) -> Axis:
        """`count` heads, of which all ranks have as many."""
        part = count // self.ranks.size
        return self._axis(count, (self.ranks.rank * part, (self.ranks.rank + 1) * part))

    def kv_heads(self, count: int) -> Axis:
        """`count` KV heads: the span has those of the rank's query heads."""
        first = self.ranks.rank * count // self.ranks.size
        last = (self.ranks.rank + 1) * count // self.ranks.size
        return self._axis(count, (first, max(first + 1, last)))

    @property
    def mlp_columns(self) -> Axis:
        """Columns of an MLP that is not wide."""
        return self._columns(self.config.intermediate_size, self._stored_unit)

    @property
    def expert_columns(self) -> Axis:
        """Columns of each expert."""
        assert self.config.experts is not None
        unit = MX_BLOCK if self.config.experts.mxfp4 else self._stored_unit
        return self._columns(self.config.experts.intermediate_size, unit)

    @property
    def shared_columns(self) -> Axis:
        """Columns of the shared expert."""
        assert self.config.experts is not None
        return self._columns(self.config.experts.shared_size, self._stored_unit)

    def of_sum(self, size: int) -> Axis:
        """Of what is added after a sum over ranks: zeros on every rank but the first."""
        return Axis(size, ((size, 2 * size),) if self.ranks.rank else ())

    @property
    def _stored_unit(self) -> int:
        """Columns that share a scale in the files."""
        schemes = () if self.config.quantization is None else self.config.quantization.schemes
        return math.lcm(*(scheme.columns for _, scheme in schemes if scheme.columns))

    def _columns(self, size: int, stored: int) -> Axis:
        """Columns in units: the largest unit that divides evenly over all ranks, else the largest
        of which each rank gets one. Columns that share a scale in the files (`stored`) are divided
        only if there are too few."""
        rank, count = self.ranks.rank, self.ranks.size
        whole = [math.lcm(stored, unit) for unit in UNITS]
        even = [unit for unit in whole if size % (unit * count) == 0]
        unit = next((unit for unit in (*even, *whole, *UNITS) if size >= unit * count), 1)
        units = -(-size // unit)
        first, last = (units * one // count * unit for one in (rank, rank + 1))
        return self._axis(size, (min(first, size), min(last, size)))

    def _axis(self, size: int, span: Span) -> Axis:
        return Axis(size, (span,) if self.ranks.size > 1 else ())

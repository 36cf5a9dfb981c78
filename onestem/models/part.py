"""The part of a model that each rank holds, where several ranks hold it together.

A rank's part is the description of a smaller model: some of the heads, of the MLPs' columns and of
the vocabulary, and everything else whole. Its tensors have the names of the whole model's; each is
a `Cut` of the tensor there.

Query heads divide evenly. KV heads that are fewer than the ranks are held by several. Columns of
MLPs and experts divide by units, so that no group that shares a scale is cut; ranks may differ by
one unit. All ranks have the same number of vocabulary rows; the last may be zeros. Norms, routers,
learned positions and the use of vectors of tokens are whole on each rank. Biases that are added
after a sum belong to rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from onestem.errors import ConfigError
from onestem.models.config import ModelConfig
from onestem.models.cuts import Cut, Span
from onestem.models.description import Alibi, LayerHeads
from onestem.models.ranks import Ranks
from onestem.ops.experts import MX_BLOCK

__all__ = ["cuts_of", "part_of", "sizes_of"]

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
    first, last = _q_span(config, ranks)
    positions = config.positions
    if isinstance(positions, Alibi):
        positions = Alibi(positions.slopes[first:last])
    heads = config.layer_heads
    if heads is not None:
        heads = tuple(replace(one, num_kv_heads=_kv_heads(one, ranks)) for one in heads)
    experts = config.experts
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=_length(_expert_span(config, ranks)),
            shared_size=_length(_shared_span(config, ranks)),
        )
    return replace(
        config,
        vocab_size=_vocabulary_rows(config, ranks),
        num_q_heads=last - first,
        num_kv_heads=_length(_kv_span(config.num_kv_heads, ranks)),
        intermediate_size=_length(_mlp_span(config, ranks)),
        positions=positions,
        layer_heads=heads,
        experts=experts,
    )


def sizes_of(config: ModelConfig) -> list[int]:
    """Numbers of ranks that a model divides over, up to `MANY`."""
    return [size for size in range(1, MANY + 1) if _indivisible(config, size) is None]


def _indivisible(config: ModelConfig, size: int) -> str | None:
    """The dimension that does not divide over `size` ranks; None: all do."""
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


# ----------------------------------------------------------------------------------------- spans


def _q_span(config: ModelConfig, ranks: Ranks) -> Span:
    count = config.num_q_heads // ranks.size
    return ranks.rank * count, (ranks.rank + 1) * count


def _kv_span(heads: int, ranks: Ranks) -> Span:
    """The KV heads of the rank's query heads."""
    first = ranks.rank * heads // ranks.size
    return first, max(first + 1, (ranks.rank + 1) * heads // ranks.size)


def _kv_heads(heads: LayerHeads, ranks: Ranks) -> int:
    return _length(_kv_span(heads.num_kv_heads, ranks))


def _mlp_span(config: ModelConfig, ranks: Ranks) -> Span:
    return _columns(config.intermediate_size, _stored_unit(config), ranks)


def _expert_span(config: ModelConfig, ranks: Ranks) -> Span:
    assert config.experts is not None
    unit = MX_BLOCK if config.experts.mxfp4 else _stored_unit(config)
    return _columns(config.experts.intermediate_size, unit, ranks)


def _shared_span(config: ModelConfig, ranks: Ranks) -> Span:
    assert config.experts is not None
    return _columns(config.experts.shared_size, _stored_unit(config), ranks)


def _stored_unit(config: ModelConfig) -> int:
    """Columns that share a scale in the files."""
    schemes = () if config.quantization is None else config.quantization.schemes
    return math.lcm(*(scheme.columns for _, scheme in schemes if scheme.columns))


def _columns(size: int, stored: int, ranks: Ranks) -> Span:
    """The rank's columns, in units: the largest unit that divides evenly over all ranks, else the
    largest of which each rank gets one. Columns that share a scale in the files (`stored`) are
    divided only if there are too few."""
    whole = [math.lcm(stored, unit) for unit in UNITS]
    even = [unit for unit in whole if size % (unit * ranks.size) == 0]
    unit = next((unit for unit in (*even, *whole, *UNITS) if size >= unit * ranks.size), 1)
    units = -(-size // unit)
    first, last = (units * rank // ranks.size * unit for rank in (ranks.rank, ranks.rank + 1))
    return min(first, size), min(last, size)


def _vocabulary_rows(config: ModelConfig, ranks: Ranks) -> int:
    return -(-config.vocab_size // ranks.size)


def _length(span: Span) -> int:
    return span[1] - span[0]


def _times(span: Span, count: int, after: int = 0) -> Span:
    return after + span[0] * count, after + span[1] * count


# ------------------------------------------------------------------------------------------ cuts

Named = Iterator[tuple[str, Cut]]


def cuts_of(config: ModelConfig, ranks: Ranks) -> Mapping[str, Cut]:
    """Name of a tensor of the whole model -> the rank's part of it. Tensors of single experts are
    included; tensors that are not named are whole."""
    return {} if ranks.size == 1 else dict(_Cuts(config, ranks).all())


class _Cuts:
    def __init__(self, config: ModelConfig, ranks: Ranks) -> None:
        self.config, self.ranks, self.names = config, ranks, config.tensor_names

    def all(self) -> Named:
        config, names, vectors = self.config, self.names, self.names.token_vectors
        rows = _vocabulary_rows(config, self.ranks)
        span = (self.ranks.rank * rows, (self.ranks.rank + 1) * rows)
        for module in (names.embedding, names.head, *([] if vectors is None else [vectors.table])):
            yield f"{module}.weight", Cut(0, (span,))
        yield f"{names.head}.bias", Cut(0, (span,))
        for layer in range(config.num_layers):
            at = names.layer.format(layer)
            yield from self.attention(at, layer)
            if config.has_mlp(layer):
                yield from self.mlp(at, layer)
            if config.has_experts(layer):
                yield from self.experts(at)

    def attention(self, at: str, layer: int) -> Named:
        config, names, heads = self.config, self.names, self.config.heads[layer]
        size, q = heads.head_dim, _q_span(self.config, self.ranks)
        kv = _kv_span(heads.num_kv_heads, self.ranks)
        if len(names.qkv) == 1:
            yield from self.rows(at + names.qkv[0], self._fused(heads, q, kv))
        else:
            for name, span in zip(names.qkv, (q, kv, kv), strict=True):
                yield from self.rows(at + name, [_times(span, size)])
        yield from self.columns(at + names.output, _times(q, size), config.hidden_size)
        if config.qk_norm_of_all:
            for name, span in zip(names.qk_norm, (q, kv), strict=True):
                yield f"{at}{name}.weight", Cut(0, (_times(span, size),))
        if names.sinks is not None:
            yield at + names.sinks, Cut(0, (q,))

    def _fused(self, heads: LayerHeads, q: Span, kv: Span) -> list[Span]:
        """Rows of q, k and v in one projection."""
        num_q, num_kv, size = self.config.num_q_heads, heads.num_kv_heads, heads.head_dim
        if not self.names.grouped:
            afters = (0, num_q, num_q + num_kv)
            pairs = zip((q, kv, kv), afters, strict=True)
            return [_times(span, size, after * size) for span, after in pairs]
        group = num_q // num_kv
        line = (group + 2) * size  # rows of one KV head
        if _length(kv) > 1 or _length(q) == group:
            return [_times(kv, line)]
        start = kv[0] * line
        within = (q[0] - kv[0] * group, q[1] - kv[0] * group)
        return [_times(within, size, start), (start + group * size, start + line)]

    def mlp(self, at: str, layer: int) -> Named:
        config, names = self.config, self.names
        size = config.mlp_size(layer)
        span = _times(_mlp_span(config, self.ranks), size // config.intermediate_size)
        fused = config.gated and len(names.up) == 1
        spans = [span, _times(span, 1, size)] if fused else [span]
        for name in names.up:
            yield from self.rows(at + name, spans)
        yield from self.columns(at + names.down, span, config.hidden_size)

    def experts(self, at: str) -> Named:
        config, names = self.config, self.names.experts
        assert names is not None
        assert config.experts is not None
        experts, hidden = config.experts, config.hidden_size
        size, span = experts.intermediate_size, _expert_span(config, self.ranks)
        halves = (span, _times(span, 1, size))
        up = (_times(span, 2),) if names.alternating else halves
        if experts.mxfp4:
            for end in ("_blocks", "_scales"):
                yield f"{at}{names.up}{end}", Cut(1, up)
                blocks = (span[0] // MX_BLOCK, span[1] // MX_BLOCK)
                yield f"{at}{names.down}{end}", Cut(2, (blocks,))
        else:
            yield at + names.up, Cut(2 if names.alternating else 1, up)
            yield at + names.down, Cut(1 if names.alternating else 2, (span,))
        if experts.bias:
            yield f"{at}{names.up}_bias", Cut(1, up)
            yield from self.once(f"{at}{names.down}_bias", 1, hidden)
        for index in range(experts.num):
            one = at + names.each.format(index)
            for name in names.each_up:
                yield from self.rows(one + name, [span])
            yield from self.columns(one + names.each_down, span, hidden)
        if experts.shared_size:
            shared = _shared_span(config, self.ranks)
            for name in names.shared_up:
                yield from self.rows(at + name, [shared])
            yield from self.columns(at + names.shared_down, shared, hidden)

    def rows(self, module: str, spans: Sequence[Span]) -> Named:
        """Cuts of the rows of a linear layer and of its bias."""
        yield f"{module}.weight", Cut(int(self.names.transposed), tuple(spans))
        yield f"{module}.bias", Cut(0, tuple(spans))

    def columns(self, module: str, span: Span, out: int) -> Named:
        """Cuts of the columns of a linear layer, whose `out` results are summed over ranks."""
        yield f"{module}.weight", Cut(int(not self.names.transposed), (span,))
        yield from self.once(f"{module}.bias", 0, out)

    def once(self, name: str, dim: int, size: int) -> Named:
        """Cut of a tensor that is added after a sum: zeros on every rank but the first."""
        if self.ranks.rank:
            yield name, Cut(dim, ((size, 2 * size),))

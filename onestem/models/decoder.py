"""One decoder for all families: the rows of a step in, their last hidden states out.

The rows of all sequences of a step are on one axis. What a row may see is not known here: the
caller hands in `attend`, which writes the rows' keys and values and attends over the step's plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.models.config import ModelConfig
from onestem.models.delta import DeltaLayer, StatesOf
from onestem.models.description import Alibi
from onestem.models.formats.tables import PackedTable
from onestem.models.linear import Activation, Head, Projection, held_tensors, padded_rows, step_rows
from onestem.models.mlp import ExpertLayer, ExpertsBeside, Mlp
from onestem.models.part import part_of
from onestem.models.places import Place, ProductPlace
from onestem.models.ranks import ALONE, Ranks
from onestem.models.rope import Rope
from onestem.models.vectors import LayerVectors, TokenVectors
from onestem.ops import Angles, Heads, LayerOps, Scores, add_layer_norm, resolve_layers
from onestem.ops.rounding import BothRows, Rows

GPU_STEP_ROWS = 8192

# attend(layer, qkv, heads, angles) -> out
#   qkv [num_rows, heads.num_projected * head_dim], before norms and rotation;
#   out [num_rows, num_q_heads, head_dim].
# The caller passes `Decoder.scores` to attention. Where heads have sinks, it gives them their share
# (`LayerOps.share_sinks`).
Attend = Callable[[int, Tensor, Heads, Angles], Tensor]


class StepRows(NamedTuple):
    """Rows before a decoder's first layer.

    Attributes:
        hidden: `[num_rows, hidden_size]`.
        angles: for each layer.
        growth: factors of queries `[num_rows, 1]`, where a model has them.
        vectors: of tokens, for each layer, where a model has them.
    """

    hidden: Tensor
    angles: Sequence[Angles]
    growth: Tensor | None
    vectors: Tensor | None


@dataclass(frozen=True, eq=False)
class Norm:
    """weight and bias: [hidden_size]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of one layer.

    Attributes:
        input_norm: before attention; None: it reads the residual itself.
        qkv: hidden_size -> heads.num_projected * head_dim, in the order q, k, v, then the gate of
            attention's result, if there is one; of a layer with the delta rule q, k, v, z.
        heads: how its result divides, and the norms over heads. None: the layer has `delta`.
        output: of attention, or of the delta rule.
        post_norm: before the MLP; None: it reads what attention reads, or in a sequential block the
            residual itself.
        output_norm, down_norm: applied to the results of attention and MLP, before they are added.
        qk_norms: over all query heads at once, and over all key heads.
        beside: experts beside the MLP.
        vectors: uses the layer's vectors of tokens.
        scalar: `[1]`, a factor of the layer's result.
    """

    input_norm: Norm | None
    qkv: Projection
    heads: Heads | None
    output: Projection
    post_norm: Norm | None
    mlp: Mlp | ExpertLayer
    output_norm: Norm | None = None
    down_norm: Norm | None = None
    qk_norms: tuple[Tensor, Tensor] | None = None
    beside: ExpertsBeside | None = None
    vectors: LayerVectors | None = None
    scalar: Tensor | None = None
    delta: DeltaLayer | None = None

    @property
    def rounds(self) -> torch.dtype | None:
        """See `Projection`, of what reads the rows before attention or the delta rule, which needs
        them as they are too."""
        return self.qkv.rounds

    @property
    def linears(self) -> tuple[Projection, ...]:
        """The layer's products, without those of experts."""
        beside = () if self.beside is None else self.beside.experts.linears
        vectors = () if self.vectors is None else (self.vectors.gate, self.vectors.output)
        rates = () if self.delta is None else (self.delta.rates,)
        return (self.qkv, *rates, self.output, *self.mlp.linears, *beside, *vectors)


class Decoder:
    """A decoder-only transformer whose attention is the caller's.

    Attributes:
        config: of the whole model.
        part: configuration of what is held here: heads of attention and of the KV cache, columns
            of MLPs, rows of the vocabulary. `config` itself where one rank holds all.
        scores: what attention does to scores, for the part's heads.
        places: name of a tensor in a checkpoint -> the places that it was put in.
        quantised: format of the weights, which then cannot be rewritten; None: they can.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor | PackedTable,
        layers: Sequence[Layer],
        norm: Norm,
        head: Head,
        num_parameters: int,
        *,
        positions: Tensor | None = None,
        vectors: TokenVectors | None = None,
        places: Iterable[Place] = (),
        quantised: str | None = None,
        ranks: Ranks = ALONE,
        ops: LayerOps | None = None,
    ) -> None:
        """embedding [vocab_size, hidden_size] gives dtype and device.

        Where several `ranks` hold the model together, all tensors are those of this rank's part.
        Results are the whole model's, on each rank.

        `positions` [max_position_embeddings, hidden_size] are learned positions, `vectors` the
        layers' vectors of tokens, `ops` what is between products (default: the device's).
        """
        self.config = config
        self.ranks = ranks
        self.part = part_of(config, ranks)
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.num_parameters = num_parameters
        self.embedding = embedding
        self.positions = positions
        self.vectors = vectors
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self.places: dict[str, list[Place]] = {}
        for place in places:
            for name in place.names:
                self.places.setdefault(name, []).append(place)
        self.quantised = quantised
        self._released: dict[torch.UntypedStorage, tuple[int, torch.UntypedStorage | None]] = {}
        self.rope = Rope(config, embedding.device)
        self.ops = ops or resolve_layers(embedding.device)
        self.scores = Scores(
            config.score_scale or config.head_dim**-0.5,
            config.score_softcap,
            _alibi_slopes(self.part, embedding.device),
        )
        # As transformers rounds it; a Python number would stay float32 inside the product.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self._activation = activation_of(config, self.ops)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        read: Tensor | None = None,
        states: StatesOf | None = None,
        last: int = -1,
    ) -> Tensor:
        """token_ids and positions [num_rows] int64 -> hidden [num_read, hidden_size].

        The result is what `logits` takes: the final norm has been applied. `read` [num_read] int64
        are the rows that it has, None: all. After the last layer's attention only these go on.
        `states`: of layers with the delta rule, where there are any. `last`: of the layers; where
        it is not the model's, nothing may be read.
        """
        return self.through(self.inputs(token_ids, positions), attend, read, states, last)

    def inputs(self, token_ids: Tensor, positions: Tensor) -> StepRows:
        """What the layers take of `forward`'s rows."""
        hidden = self._embed(token_ids, positions)
        return StepRows(
            hidden,
            self.rope.angles(positions),
            _growth(self.config, positions, self.dtype),
            None if self.vectors is None else self.vectors(token_ids, hidden, self.ops),
        )

    @torch.inference_mode()
    def through(
        self,
        rows: StepRows,
        attend: Attend,
        read: Tensor | None = None,
        states: StatesOf | None = None,
        last: int = -1,
    ) -> Tensor:
        """`forward` from the first layer on. It writes to `rows.hidden`."""
        hidden, angles, growth, vectors = rows
        sequential = self.config.block == "sequential"
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            rounds = layer.rounds if sequential else None
            both = layer.delta is not None
            normed = self.normed(hidden, delta, layer.input_norm, rounds, both=both)
            if layer.delta is not None and states is not None:
                plain, given = normed if isinstance(normed, BothRows) else (normed, normed)
                out = layer.delta(plain, layer.qkv(given), states(index))
            else:
                out = self._attention(index, layer, normed, growth, angles[index], attend)
            if read is not None and index == last % len(self.layers):
                if not len(read):
                    return hidden[:0]
                out, hidden = out[read], hidden[read]
                normed = normed if sequential else normed[read]
                vectors = None if vectors is None else vectors[read]
            delta = layer.output(out)
            if sequential:
                delta = self._given(self.ranks.sum(delta), layer.output_norm)
                rounds, both = layer.mlp.rounds, isinstance(layer.mlp, ExpertLayer)
                normed = self.normed(hidden, delta, layer.post_norm, rounds, both=both)
                delta = self._given(self.mlp(layer, normed, hidden), layer.down_norm)
            else:
                beside = self.normed(hidden, None, layer.post_norm) if layer.post_norm else normed
                delta = self.ranks.sum(delta.add_(layer.mlp(beside, self._activation)))
            if layer.vectors is not None and vectors is not None:
                delta = layer.vectors(hidden.add_(delta), vectors[:, index], self.ops)
                delta = self._rms_norm(delta, layer.vectors.norm)
            if layer.scalar is not None:
                hidden, delta = hidden.add_(delta).mul_(layer.scalar), None
        return self.normed(hidden, delta, self.norm)

    def normed(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        norm: Norm | None,
        rounds: torch.dtype | None = None,
        *,
        both: bool = False,
    ) -> Any:
        """The norm of hidden + delta, which replaces hidden, or that sum where there is no norm:
        all `[num_rows, hidden_size]`. With `rounds`, the dtype that the next product rounds its
        rows to, the result may be `RoundedRows`, or `BothRows` for others beside it."""
        eps, is_rms = self.config.norm_eps, self.config.norm == "rms"
        if norm is None:
            return hidden if delta is None else hidden.add_(delta)
        if is_rms and rounds is not None and both:
            return self.ops.both_rms_norm(hidden, delta, norm.weight, eps, rounds)
        if is_rms and rounds is not None:
            return self.ops.rounded_rms_norm(hidden, delta, norm.weight, eps, rounds)
        if is_rms:
            return self.ops.add_rms_norm(hidden, delta, norm.weight, eps)
        return add_layer_norm(hidden, delta, norm.weight, norm.bias, eps)

    def padded_rows(self, rows: int) -> int:
        """Number of rows that a step of `rows` is best padded to."""
        if self.head.deterministic and self.device.type == "cuda":
            from onestem.models import by_row_gpu

            return by_row_gpu.padded_rows(rows)
        return padded_rows(rows, self.head.layout, self.dtype)

    @property
    def step_rows(self) -> int:
        """Best number of rows of a step when enough are there."""
        if self.device.type != "cpu":
            return GPU_STEP_ROWS
        return step_rows(self.head.layout, self.dtype)

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.ranks.embedding(token_ids, self.embedding)
        if self._embedding_scale != 1:
            hidden *= self._embedding_scale
        return hidden if self.positions is None else hidden + F.embedding(positions, self.positions)

    def _attention(
        self,
        index: int,
        layer: Layer,
        normed: Rows,
        growth: Tensor | None,
        angles: Angles,
        attend: Attend,
    ) -> Tensor:
        """What attention gives of `[num_rows, hidden_size]`: `[num_rows, num_q_heads * head_dim]`,
        gated where the model does so."""
        heads = layer.heads
        assert heads is not None
        qkv = self._qkv(layer, heads, normed, growth)
        if not self.config.output_gate:
            return attend(index, qkv, heads, angles).flatten(1)
        columns = heads.num_projected * heads.head_dim
        gate = self.ops.sigmoid(qkv[:, columns:])
        out = attend(index, qkv[:, :columns].contiguous(), heads, angles)
        return gate.mul_(out.flatten(1))

    def _qkv(self, layer: Layer, heads: Heads, normed: Rows, growth: Tensor | None) -> Tensor:
        qkv, clip = layer.qkv(normed), self.config.qkv_clip
        if layer.qk_norms is not None:
            sizes = [len(weight) for weight in layer.qk_norms]
            parts = qkv.split([*sizes, qkv.shape[1] - sum(sizes)], dim=1)
            self._norm_heads(parts[:2], layer.qk_norms)
        if growth is not None:
            qkv[:, : heads.num_q_heads * heads.head_dim] *= growth
        return qkv if clip is None else qkv.clamp_(-clip, clip)

    def _norm_heads(self, parts: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """RMSNorm over all query heads, and over all key heads, in place."""
        eps = self.config.norm_eps
        if self.ranks.size == 1:
            for part, weight in zip(parts, weights, strict=True):
                part.copy_(self.ops.add_rms_norm(part.contiguous(), None, weight, eps))
            return
        squares = [part.float().square().sum(1, keepdim=True) for part in parts]
        # Heads that several ranks hold count several times, both in the sum and in the width.
        means = self.ranks.sum(torch.cat(squares, 1)).split(1, dim=1)
        for part, weight, mean in zip(parts, weights, means, strict=True):
            root = (mean / (self.ranks.size * len(weight))).add_(eps).rsqrt_()
            part.copy_(part.float() * root * weight)

    def mlp(self, layer: Layer, normed: Any, hidden: Tensor) -> Tensor:
        """A layer's MLP or experts, or both: [num_rows, hidden_size] -> [num_rows, hidden_size].
        `hidden` is the residual."""
        out = self.ranks.sum(layer.mlp(normed, self._activation))
        if layer.beside is None:
            return out
        return layer.beside.added(out, hidden, self._rms_norm, self._activation, self.ranks)

    def _rms_norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self.ops.add_rms_norm(rows, None, weight, self.config.norm_eps)

    def _given(self, delta: Tensor, norm: Norm | None) -> Tensor:
        """What a part of a layer adds to the residual."""
        if norm is not None:
            delta = self.normed(delta, None, norm)
        scale = self.config.residual_scale
        return delta if scale == 1 else delta.mul_(scale)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size] float32."""
        logits, config = self.ranks.gather(self.head(hidden)), self.config
        if logits.shape[1] > config.vocab_size:
            logits = logits[:, : config.vocab_size].contiguous()
        if config.logit_scale != 1:
            logits *= config.logit_scale
        cap = config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take here, with packed copies; shared tensors count once."""
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """All weights, and their packed copies, each once."""
        parts = [self.embedding, self.norm, self.head, self.positions, self.vectors, self.layers]
        return list({id(tensor): tensor for tensor in held_tensors(parts)}.values())

    def release(self, *, keep: bool) -> None:
        """Free the weights' memory; the tensor objects stay.

        Args:
            keep: move their values to host memory. On a CPU they are there already.
        """
        if keep and self.device.type == "cpu":
            return
        plain = (tensor for tensor in self.tensors if not tensor.is_mkldnn)
        for storage in dict.fromkeys(tensor.untyped_storage() for tensor in plain):
            if storage not in self._released:
                self._released[storage] = storage.nbytes(), storage.cpu() if keep else None
                storage.resize_(0)
            elif not keep:
                self._released[storage] = self._released[storage][0], None
        if not keep:
            for place in (place for held in self.places.values() for place in held):
                if isinstance(place, ProductPlace):
                    place.product.packed = None  # writing makes it again

    def restore(self) -> None:
        """Take the memory again, with the values that were kept; others have to be written."""
        for storage, (size, values) in self._released.items():
            storage.resize_(size)
            if values is not None:
                storage.copy_(values)
        self._released.clear()

    @property
    def scratch_bytes(self) -> int:
        """Bytes on a GPU that the largest product takes beside its rows and weights."""
        linears = [one for layer in self.layers for one in layer.linears]
        linears += [] if self.vectors is None else [self.vectors.projection]
        return max((one.scratch_bytes for one in linears), default=0)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state, over all layers with the delta rule; 0: there are none."""
        return 0 if self.part.delta is None else self.part.delta.state_bytes(self.dtype.itemsize)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values on this rank, over all layers."""
        return self.part.kv_values_per_token * self.dtype.itemsize


def _growth(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Factor of each row's queries, `[num_rows, 1]`."""
    if config.query_growth is None:
        return None
    beta, spans = config.query_growth.beta, positions // config.query_growth.positions
    return (1 + beta * torch.log(1 + spans.float())).to(dtype)[:, None]


def activation_of(config: ModelConfig, ops: LayerOps) -> Activation:
    """The activation of a model's MLPs."""
    if config.mlp == "silu_gated":
        return Activation(config.mlp, ops.silu_mul, ops.rounded_silu_mul)
    if config.mlp == "gelu_tanh_gated":
        return Activation(config.mlp, ops.gelu_mul)
    kind = "tanh" if config.mlp == "gelu_tanh" else "none"
    return Activation(config.mlp, partial(ops.gelu, approximate=kind))


def _alibi_slopes(config: ModelConfig, device: torch.device) -> Tensor | None:
    if not isinstance(config.positions, Alibi):
        return None
    return torch.tensor(config.positions.slopes, dtype=torch.float32, device=device)

"""One decoder for all families: the rows of a step in, their last hidden states out.

The rows of all sequences of a step stand on one axis. What a row may see is not known here: the
caller hands in `attend`, which writes the rows' keys and values and attends over the step's plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.models.config import Alibi, ModelConfig
from onestem.models.linear import Head, Linear, padded_rows, step_rows
from onestem.models.parts import Part
from onestem.models.rope import Rope
from onestem.ops import Angles, Heads, LayerOps, add_layer_norm, resolve_layers

__all__ = ["Attend", "Decoder", "Layer", "Norm"]

GPU_STEP_ROWS = 8192

# attend(layer, qkv, heads, angles) -> out
#   qkv [num_rows, (num_q_heads + 2 * num_kv_heads) * head_dim], before norms and rotation;
#   out [num_rows, num_q_heads, head_dim].
# With ALiBi, `Decoder.alibi_slopes` are for the caller to add.
Attend = Callable[[int, Tensor, Heads, Angles], Tensor]


@dataclass(frozen=True, eq=False)
class Norm:
    """weight and bias: [hidden_size]."""

    weight: Tensor
    bias: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of one layer.

    Attributes:
        input_norm: before attention.
        qkv: hidden_size -> (num_q_heads + 2 * num_kv_heads) * head_dim, in the order q, k, v.
        heads: how its result divides, and the norms over heads.
        post_norm: before the MLP; None: it reads what attention reads.
        up: hidden_size -> intermediate_size; a gated MLP's twice that, in the order gate, up.
    """

    input_norm: Norm
    qkv: Linear
    heads: Heads
    output: Linear
    post_norm: Norm | None
    up: Linear
    down: Linear

    def tensors(self) -> list[Tensor]:
        """Every tensor that is held, to count bytes by."""
        held = self.input_norm.tensors() + (self.post_norm.tensors() if self.post_norm else [])
        held += [norm for norm in (self.heads.q_norm, self.heads.k_norm) if norm is not None]
        return held + [tensor for linear in self.linears for tensor in linear.tensors()]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.up, self.down


class Decoder:
    """A decoder-only transformer whose attention is the caller's.

    Attributes:
        alibi_slopes: float32 [num_q_heads], for attention; None: no biases on scores.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: Sequence[Layer],
        norm: Norm,
        head: Head,
        num_parameters: int,
        *,
        positions: Tensor | None = None,
        ops: LayerOps | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        """embedding [vocab_size, hidden_size] gives dtype and device.

        `positions` [max_position_embeddings, hidden_size] are learned ones. `ops` is what runs
        between the products; None: the fastest that the device has. `parts`: where each tensor of
        a checkpoint went.
        """
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.num_parameters = num_parameters
        self.embedding = embedding
        self.positions = positions
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self.parts = tuple(parts)
        self._released: dict[torch.UntypedStorage, tuple[int, torch.UntypedStorage | None]] = {}
        self.rope = Rope(config, embedding.device)
        self.ops = ops or resolve_layers(embedding.device)
        self.alibi_slopes = _alibi_slopes(config, embedding.device)
        self._add_norm = _add_norm(config, self.ops)
        self._activation = _activation(config, self.ops)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids and positions [num_rows] int64 -> hidden [num_rows, hidden_size].

        The result is what `logits` takes: the final norm has been applied.
        """
        angles, add_norm = self.rope.angles(positions), self._add_norm
        sequential = self.config.block == "sequential"
        hidden = self._embed(token_ids, positions)
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            normed = add_norm(hidden, delta, layer.input_norm)
            out = attend(index, self._qkv(layer, normed), layer.heads, angles)
            delta = layer.output(out.flatten(1))
            if sequential:
                assert layer.post_norm is not None
                delta = self._mlp(layer, add_norm(hidden, delta, layer.post_norm))
            else:
                beside = add_norm(hidden, None, layer.post_norm) if layer.post_norm else normed
                delta += self._mlp(layer, beside)
        return add_norm(hidden, delta, self.norm)

    def padded_rows(self, rows: int) -> int:
        """How many rows a step of `rows` had better have."""
        return padded_rows(rows, self.head.layout, self.dtype)

    @property
    def step_rows(self) -> int:
        """How many rows a step had better have where there is no lack of them."""
        if self.device.type != "cpu":
            return GPU_STEP_ROWS
        return step_rows(self.head.layout, self.dtype)

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = F.embedding(token_ids, self.embedding)
        return hidden if self.positions is None else hidden + F.embedding(positions, self.positions)

    def _qkv(self, layer: Layer, normed: Tensor) -> Tensor:
        qkv, clip = layer.qkv(normed), self.config.qkv_clip
        return qkv if clip is None else qkv.clamp_(-clip, clip)

    def _mlp(self, layer: Layer, normed: Tensor) -> Tensor:
        pieces = [self._activation(layer.up(piece)) for piece in layer.up.pieces(normed)]
        return layer.down(pieces[0] if len(pieces) == 1 else torch.cat(pieces))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size] float32."""
        return self.head(hidden)

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take, packed copies included and shared tensors counted once."""
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        """All weights, each once."""
        held = [self.embedding, *self.norm.tensors(), *self.head.tensors()]
        held += [] if self.positions is None else [self.positions]
        held += [tensor for layer in self.layers for tensor in layer.tensors()]
        return list({id(tensor): tensor for tensor in held}.values())

    def release(self, *, keep: bool) -> None:
        """Free the weights' memory; tensors stay the objects that they are.

        Args:
            keep: their values wait in host memory, where those of a CPU are already.
        """
        if keep and self.device.type == "cpu":
            return
        for tensor in self._tensors():
            if tensor.is_mkldnn:
                continue
            storage = tensor.untyped_storage()
            size, _ = self._released.get(storage, (storage.nbytes(), None))
            self._released[storage] = size, storage.cpu() if keep else None
            storage.resize_(0)
        if not keep:
            for layer in self.layers:
                for linear in layer.linears:
                    linear.drop_packed()
            self.head.drop_packed()

    def restore(self) -> None:
        """Take the memory again, with the values that wait; others have to be written."""
        for storage, (size, values) in self._released.items():
            storage.resize_(size)
            if values is not None:
                storage.copy_(values)
        self._released.clear()

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory of one token's keys and values over all layers."""
        return self.config.kv_values_per_token * self.dtype.itemsize


# (hidden, delta, norm) -> the norm of hidden + delta, which becomes hidden.
AddNorm = Callable[[Tensor, Tensor | None, Norm], Tensor]


def _add_norm(config: ModelConfig, ops: LayerOps) -> AddNorm:
    eps = config.norm_eps
    if config.norm == "rms":
        return lambda hidden, delta, norm: ops.add_rms_norm(hidden, delta, norm.weight, eps)
    return lambda hidden, delta, norm: add_layer_norm(hidden, delta, norm.weight, norm.bias, eps)


def _activation(config: ModelConfig, ops: LayerOps) -> Callable[[Tensor], Tensor]:
    if config.mlp == "silu_gated":
        return ops.silu_mul
    kind = "tanh" if config.mlp == "gelu_tanh" else "none"
    return lambda up: F.gelu(up, approximate=kind)


def _alibi_slopes(config: ModelConfig, device: torch.device) -> Tensor | None:
    if not isinstance(config.positions, Alibi):
        return None
    return torch.tensor(config.positions.slopes, dtype=torch.float32, device=device)

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

from onestem.models.config import ModelConfig
from onestem.models.linear import Head, Linear
from onestem.models.rope import Rope, rotate

__all__ = ["Attend", "Decoder", "Layer"]

# attend(layer, q, k, v) -> out
#   q [num_rows, num_q_heads, head_dim], k and v [num_rows, num_kv_heads, head_dim], contiguous,
#   q and k with RoPE applied; out [num_rows, num_q_heads, head_dim].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """The weights of one layer.

    Attributes:
        input_norm, post_norm: [hidden_size], before attention and before the MLP.
        qkv: hidden_size -> (num_q_heads + 2 * num_kv_heads) * head_dim, in the order q, k, v.
        q_norm, k_norm: [head_dim], or `None`.
        gate_up: hidden_size -> 2 * intermediate_size, in the order gate, up.
    """

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear

    def tensors(self) -> list[Tensor]:
        """Every tensor that is held, to count bytes by."""
        norms = [self.input_norm, self.q_norm, self.k_norm, self.post_norm]
        linears = (self.qkv, self.output, self.gate_up, self.down)
        held = [tensor for tensor in norms if tensor is not None]
        return held + [tensor for linear in linears for tensor in linear.tensors()]


class Decoder:
    """A decoder-only transformer whose attention is the caller's."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: Sequence[Layer],
        norm: Tensor,
        head: Head,
        num_parameters: int,
    ) -> None:
        """embedding [vocab_size, hidden_size] and norm [hidden_size] give dtype and device."""
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.num_parameters = num_parameters
        self.embedding = embedding
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self.rope = Rope(config, embedding.device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids and positions [num_rows] int64 -> hidden [num_rows, hidden_size].

        The result is what `logits` takes: the final norm has been applied.
        """
        cos, sin = self.rope.angles(positions, self.dtype)
        hidden = F.embedding(token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            q, k, v = self._queries_keys_values(layer, hidden, cos, sin)
            attended = attend(index, q, k, v).flatten(1)
            hidden += layer.output(attended)
            hidden += self._mlp(layer, hidden)
        return self._normed(hidden, self.norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size] float32."""
        return self.head(hidden)

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take, packed copies included and shared tensors counted once."""
        held = [self.embedding, self.norm, *self.head.tensors()]
        held += [tensor for layer in self.layers for tensor in layer.tensors()]
        distinct = {id(tensor): tensor for tensor in held}
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in distinct.values())

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory of one token's keys and values over all layers."""
        config = self.config
        elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return elements * self.dtype.itemsize

    def _queries_keys_values(
        self, layer: Layer, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        q_heads, kv_heads = config.num_q_heads, config.num_kv_heads
        fused = layer.qkv(self._normed(hidden, layer.input_norm))
        heads = fused.view(fused.shape[0], q_heads + 2 * kv_heads, config.head_dim)
        q, k = heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads]
        v = heads[:, q_heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        fused = layer.gate_up(self._normed(hidden, layer.post_norm))
        gate, up = fused.chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last axis, in float32 inside and rounded once."""
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

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
from onestem.models.rope import Rope
from onestem.ops import Angles, Heads, LayerOps, resolve_layers

__all__ = ["Attend", "Decoder", "Layer"]

# attend(layer, qkv, heads, angles) -> out
#   qkv [num_rows, (num_q_heads + 2 * num_kv_heads) * head_dim], before norms and rotation;
#   out [num_rows, num_q_heads, head_dim].
Attend = Callable[[int, Tensor, Heads, Angles], Tensor]


@dataclass(frozen=True)
class Layer:
    """The weights of one layer.

    Attributes:
        input_norm, post_norm: [hidden_size], before attention and before the MLP.
        qkv: hidden_size -> (num_q_heads + 2 * num_kv_heads) * head_dim, in the order q, k, v.
        heads: how its result divides, and the norms over heads.
        gate_up: hidden_size -> 2 * intermediate_size, in the order gate, up.
    """

    input_norm: Tensor
    qkv: Linear
    heads: Heads
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear

    def tensors(self) -> list[Tensor]:
        """Every tensor that is held, to count bytes by."""
        norms = [self.input_norm, self.heads.q_norm, self.heads.k_norm, self.post_norm]
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
        ops: LayerOps | None = None,
    ) -> None:
        """embedding [vocab_size, hidden_size] and norm [hidden_size] give dtype and device.

        `ops` is what runs between the products; None: the fastest that the device has.
        """
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.num_parameters = num_parameters
        self.embedding = embedding
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self.rope = Rope(config, embedding.device)
        self.ops = ops or resolve_layers(embedding.device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids and positions [num_rows] int64 -> hidden [num_rows, hidden_size].

        The result is what `logits` takes: the final norm has been applied.
        """
        angles, ops, eps = self.rope.angles(positions), self.ops, self.config.rms_norm_eps
        hidden = F.embedding(token_ids, self.embedding)
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(ops.add_rms_norm(hidden, delta, layer.input_norm, eps))
            delta = layer.output(attend(index, qkv, layer.heads, angles).flatten(1))
            gate_up = layer.gate_up(ops.add_rms_norm(hidden, delta, layer.post_norm, eps))
            delta = layer.down(ops.silu_mul(gate_up))
        return ops.add_rms_norm(hidden, delta, self.norm, eps)

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

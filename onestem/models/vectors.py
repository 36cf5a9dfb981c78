"""Vectors that each layer has for each token of the vocabulary (Gemma's per-layer embeddings)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from onestem.models.linear import Projection
from onestem.models.ranks import ALONE, Ranks
from onestem.ops import LayerOps


@dataclass(frozen=True, eq=False)
class TokenVectors:
    """Vectors of all layers: a token's own, plus the projection of its embedding.

    Attributes:
        table: `[vocab_size, num_layers * size]`.
        projection: hidden_size -> num_layers * size.
        norm: `[size]`, over each layer's part of the projection.
        eps: of that norm.
        scale: of the table's vectors, rounded to their dtype.
        ranks: hold the table together; all else is whole on each.
    """

    table: Tensor
    projection: Projection
    norm: Tensor
    eps: float
    scale: float
    ranks: Ranks = ALONE

    def __call__(self, token_ids: Tensor, embeddings: Tensor, ops: LayerOps) -> Tensor:
        """token_ids `[num_rows]`, embeddings `[num_rows, hidden_size]` ->
        `[num_rows, num_layers, size]`."""
        own = self.ranks.embedding(token_ids, self.table).mul_(self.scale)
        projected = self.projection(embeddings).mul_(embeddings.shape[1] ** -0.5)
        projected = projected.view(-1, len(self.norm))
        normed = ops.add_rms_norm(projected, None, self.norm, self.eps).view(own.shape)
        return normed.add_(own).mul_(2**-0.5).unflatten(1, (-1, len(self.norm)))


@dataclass(frozen=True, eq=False)
class LayerVectors:
    """A layer's use of its vectors: the residual gates them, and their projection is added to it.

    Attributes:
        gate: hidden_size -> size.
        output: size -> hidden_size.
        norm: `[hidden_size]`, of the result.
    """

    gate: Projection
    output: Projection
    norm: Tensor

    def __call__(self, hidden: Tensor, vectors: Tensor, ops: LayerOps) -> Tensor:
        """hidden `[num_rows, hidden_size]`, vectors `[num_rows, size]` -> the result before its
        norm, `[num_rows, hidden_size]`."""
        return self.output(ops.gelu(self.gate(hidden), "tanh").mul_(vectors))

"""How much rows attend to tokens: sums of attention's weights, which its kernels do not give."""

from __future__ import annotations

import torch
from torch import Tensor

from onestem.ops.scores import Scores


def attended(
    q: Tensor, k: Tensor, lse: Tensor, scores: Scores, distance: Tensor | None = None
) -> Tensor:
    """The weights that rows give to tokens, summed over rows and heads, in each of some parts.

    Args:
        q: `[num_parts, num_rows, num_q_heads, head_dim]`, rotated to where the rows see the tokens
            from.
        k: `[num_parts, num_tokens, num_kv_heads, head_dim]`, as stored.
        lse: float32 `[num_parts, num_rows, num_q_heads]`, of all that each row sees, natural log;
            infinite: it counts for nothing.
        distance: int64 `[num_parts, num_rows, num_tokens]`, position of the token less the row's;
            only ALiBi asks for it.

    Returns:
        float32 `[num_parts, num_tokens]`, each from 0 to `num_rows * num_q_heads`.
    """
    parts, rows, heads, size = q.shape
    num_kv_heads = k.shape[2]
    # [parts * num_kv_heads, rows * group, head_dim] times [.., head_dim, num_tokens]
    grouped = q.view(parts, rows, num_kv_heads, -1, size)
    asked = grouped.transpose(1, 2).reshape(parts * num_kv_heads, -1, size)
    products = _products(asked, k.permute(0, 2, 3, 1).flatten(0, 1))
    weights = products.view(parts, num_kv_heads, rows, heads // num_kv_heads, -1)
    weights.mul_(scores.factor(size))
    if scores.softcap is not None:
        weights.div_(scores.softcap).tanh_().mul_(scores.softcap)
    if scores.alibi_slopes is not None:
        assert distance is not None
        slopes = scores.alibi_slopes.view(num_kv_heads, 1, -1, 1)
        weights.add_(slopes * distance[:, None, :, None])
    weights.sub_(lse.view(parts, rows, num_kv_heads, -1).transpose(1, 2).unsqueeze(-1)).exp_()
    return weights.sum((1, 2, 3))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """float32, of exact products."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())

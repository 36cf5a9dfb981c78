"""How much rows attend to tokens: sums of attention's weights, which its kernels do not give."""

from __future__ import annotations

import torch
from torch import Tensor

from onestem.ops.scores import Scores


def attended(
    q: Tensor, k: Tensor, lse: Tensor, scores: Scores, distance: Tensor | None = None
) -> Tensor:
    """The weights that rows give to tokens, summed over rows and heads.

    Args:
        q: `[num_rows, num_q_heads, head_dim]`, rotated to where the rows see the tokens from.
        k: `[num_tokens, num_kv_heads, head_dim]`, as stored.
        lse: float32 `[num_rows, num_q_heads]`, of all that each row sees, natural log.
        distance: int64 `[num_rows, num_tokens]`, position of the token less the row's; only
            ALiBi asks for it.

    Returns:
        float32 `[num_tokens]`, each from 0 to `num_rows * num_q_heads`.
    """
    rows, heads, size = q.shape
    num_kv_heads = k.shape[1]
    # [num_kv_heads, rows * group, head_dim] times [num_kv_heads, head_dim, num_tokens]
    grouped = (q.float() * scores.factor(size)).view(rows, num_kv_heads, -1, size).transpose(0, 1)
    products = torch.bmm(grouped.reshape(num_kv_heads, -1, size), k.float().permute(1, 2, 0))
    weights = products.view(num_kv_heads, rows, heads // num_kv_heads, -1)
    if scores.softcap is not None:
        weights.div_(scores.softcap).tanh_().mul_(scores.softcap)
    if scores.alibi_slopes is not None:
        assert distance is not None
        slopes = scores.alibi_slopes.view(num_kv_heads, 1, -1, 1)
        weights.add_(slopes * distance[None, :, None])
    weights.sub_(lse.view(rows, num_kv_heads, -1).transpose(0, 1).unsqueeze(-1)).exp_()
    return weights.sum((0, 1, 2))

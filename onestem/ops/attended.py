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
    grouped = q.float().view(rows, num_kv_heads, heads // num_kv_heads, size)
    products = torch.einsum("rghd,tgd->rght", grouped, k.float()) * scores.factor(size)
    products = products.reshape(rows, heads, -1)
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    if scores.alibi_slopes is not None:
        assert distance is not None
        products += scores.alibi_slopes[:, None] * distance[:, None]
    return torch.exp(products - lse[:, :, None]).sum((0, 1))

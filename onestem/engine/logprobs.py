"""Natural-log probabilities of tokens under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onestem.engine.draw import chunks, leading, values_at
from onestem.request import TokenLogprobs

__all__ = ["logprobs_of", "token_logprobs"]


def token_logprobs(logits: Tensor, token_ids: Sequence[int] | Tensor) -> Tensor:
    """Natural-log probability of one token per row.

    Args:
        logits: `[n, vocab]`, unprocessed.
        token_ids: `[n]`.

    Returns:
        float64 `[n]`, on the logits' device.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)
    if len(ids) == 0:
        return torch.zeros(0, dtype=torch.float64, device=logits.device)
    return values_at(logits, ids).double() - _normalizers(logits)


def logprobs_of(
    logits: Tensor, token_ids: Sequence[int] | Tensor, num_alternatives: int | Sequence[int]
) -> list[TokenLogprobs]:
    """Natural-log probabilities of given tokens and of the most probable ones beside them.

    Args:
        logits: `[n, vocab]`, unprocessed: this is the model's own distribution.
        token_ids: `[n]`; always part of the result.
        num_alternatives: how many of the most probable tokens, for all rows or for each.

    Returns:
        For each row token id -> log-probability, highest first, equal ones by id.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)
    rows = len(ids)
    wanted = [num_alternatives] * rows if isinstance(num_alternatives, int) else num_alternatives
    if rows == 0:
        return []
    normalizers = _normalizers(logits)
    own = (values_at(logits, ids).double() - normalizers).tolist()
    most = min(max(wanted), logits.shape[1])
    top_values, top_ids = _most_probable(logits, most)
    top = (top_values.double() - normalizers.unsqueeze(1)).tolist()
    return [
        _merged(dict(zip(some_ids[:count], values[:count], strict=True)), token, logprob)
        for some_ids, values, count, token, logprob in zip(
            top_ids.tolist(), top, wanted, ids.tolist(), own, strict=True
        )
    ]


def _normalizers(logits: Tensor) -> Tensor:
    """Natural log of the sum of exponentials of each row of `[n, vocab]`, float64 `[n]`."""
    parts = [part.double().logsumexp(dim=-1) for part in chunks(logits, logits.shape[1])]
    return torch.cat(parts)


def _merged(alternatives: dict[int, float], token: int, logprob: float) -> dict[int, float]:
    if token in alternatives:
        return alternatives
    # It is not among the most probable, so it stands behind them.
    return {**alternatives, token: logprob}


def _most_probable(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Logits and ids `[n, count]` of the leading tokens, in their order."""
    if count == 0:
        empty = logits[:, :0]
        return empty, empty.long()
    # Some more than asked for, so that equal logits at the end seldom need a full sort.
    values, ids, trusted = leading(logits, 2 * count + 16)
    values, ids = values[:, :count].clone(), ids[:, :count].clone()
    unsure = (trusted < count).nonzero().flatten()
    for part in chunks(unsure, logits.shape[1]):
        all_values, all_ids, _ = leading(logits[part], logits.shape[1])
        values[part], ids[part] = all_values[:, :count], all_ids[:, :count]
    return values, ids
